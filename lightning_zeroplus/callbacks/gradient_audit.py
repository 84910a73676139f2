"""GradientAudit: does the optimizer consume the gradients that the backwards computed?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zeroplus.callbacks.audit.comparison import Comparison
from lightning_zeroplus.callbacks.audit.ledger import Ledger
from lightning_zeroplus.callbacks.audit.report import (
    GradientMismatchError,
    ParameterAudit,
    describe_failure,
    print_results,
)
from lightning_zeroplus.callbacks.audit.sharded import Sharded, sharded_parameters
from lightning_zeroplus.callbacks.audit.shares import named_parameters
from lightning_zeroplus.callbacks.audit.stepper import Stepper, find_steppers
from lightning_zeroplus.gradients.clip import Clip
from lightning_zeroplus.gradients.loss_scale import running
from lightning_zeroplus.precision.zero import part_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

_AUDITABLE = (DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy)


class GradientAudit(Callback):
    """Checks, in the first optimizer steps, that the optimizer consumes what the backwards computed.

    On one side, a tensor hook on every parameter sums the raw gradient of every backward, before any strategy changes
    it; the sums are averaged over the ranks. On the other side, a pre-hook on the innermost ``torch.optim.Optimizer``
    reads the gradients that it is about to use, in any form: ``param.grad``, the gradient of an fp32 master weight,
    this rank's part of a flat partition or of a DTensor. Between the two lie accumulation, reduction, partitioning,
    loss scaling, offload and clipping. The audit relies on none of them; it reads the clipping limits and the loss
    scale only.

    It works with ``ZeroPlusStrategy``, ``ZeroPlusFSDPStrategy``, Lightning's ``DeepSpeedStrategy``, FSDP2 under its
    ``ModelParallelStrategy``, DDP and a single device; in manual and automatic optimization; with any number of
    backwards, optimizers, tied, frozen and unused parameters. The last audited step prints a table. ``docs/audit.md``
    explains the table, and what the audit cannot see.

    Until it is done, it needs one full gradient of the audited parameters on every rank, in at least fp32. Audited
    steps take two all-reduces per parameter. Afterwards it costs nothing. All ranks must take the audited steps
    together.

    Args:
        steps: How many optimizer steps to audit; with several optimizers, this many per optimizer on average.
        tolerance: The largest error of a parameter, as :class:`~lightning_zeroplus.ParameterAudit` defines it. None:
            1e-5 if a gradient is fp32 or fp64 from leaf to optimizer, 4e-3 if it is fp16 anywhere, 3e-2 if bf16.
        parameters: One or several shell patterns for the names of the parameters to audit, such as ``"encoder.*"``.
            If they leave parameters out, clipping by norm counts as a common factor of at most 1.
        on_mismatch: ``"raise"`` or ``"warn"``.

    Raises:
        ValueError: If an argument is out of range.
        MisconfigurationException: At the start of a fit, if the strategy cannot be audited or no name matches.
        GradientMismatchError: On all ranks, if gradients differ: with DeepSpeed after the update, otherwise before it.

    Attributes:
        results: The result of every parameter in every audited step; the same on all ranks.

    Example::

        Trainer(strategy="deepspeed_stage_2", callbacks=[zp.GradientAudit()]).fit(module)
    """

    results: list[ParameterAudit]

    def __init__(
        self,
        steps: int = 2,
        tolerance: float | None = None,
        parameters: str | Sequence[str] = "*",
        on_mismatch: Literal["raise", "warn"] = "raise",
    ) -> None:
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"`steps` must be a positive integer, not {steps!r}.")
        number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
        if tolerance is not None and not (number and 0 <= tolerance < math.inf):
            raise ValueError(f"`tolerance` must be None or a number of at least 0, not {tolerance!r}.")
        if on_mismatch not in ("raise", "warn"):
            raise ValueError(f'`on_mismatch` must be "raise" or "warn", not {on_mismatch!r}.')
        patterns = parameters if isinstance(parameters, (list, tuple)) else [parameters]
        if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"`parameters` must be a pattern of names, or a list of patterns, not {parameters!r}.")
        self.steps = steps
        self.tolerance = tolerance
        self.parameters = (parameters,) if isinstance(parameters, str) else tuple(parameters)
        self.on_mismatch = on_mismatch
        self._attached = ExitStack()
        self._reset()

    def _reset(self) -> None:
        self.results = []
        self._audited = 0
        self._finished = False
        self._backwards = 0
        self._steppers: list[Stepper] = []
        self._ledger: Ledger | None = None
        self._watched: dict[str, nn.Parameter] = {}
        self._sharded: dict[str, Sharded] = {}
        self._measured_scale: float | None = None

    @property
    def audited_steps(self) -> int:
        """How many optimizer steps have been audited."""
        return self._audited

    @property
    def finished(self) -> bool:
        """Whether all ``steps`` have been audited."""
        return self._finished

    @property
    def _active(self) -> bool:
        return self._ledger is not None and not self._finished

    # -- start and end ------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(trainer.strategy, _AUDITABLE):
            raise MisconfigurationException(
                f"`GradientAudit` cannot audit `{type(trainer.strategy).__name__}`: it does not know which leaves a"
                " backward reaches there. Audit the loop under `zeroplus_fsdp`, `zeroplus_stage3` or `ddp`, or remove"
                " the callback."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._detach()
        self._reset()
        names = [name for name, _ in named_parameters(pl_module)]
        if not any(self._matches(name) for name in names):
            raise MisconfigurationException(
                f"`GradientAudit(parameters={list(self.parameters)!r})` matches no parameter of"
                f" `{type(pl_module).__name__}`. Its parameters are named like {', '.join(map(repr, names[:3]))}."
            )
        engine = trainer.strategy.model if isinstance(trainer.strategy, DeepSpeedStrategy) else None
        if isinstance(trainer.strategy, ModelParallelStrategy):
            self._sharded = sharded_parameters(pl_module)
        self._steppers = find_steppers(engine, trainer.optimizers, pl_module)
        self._ledger = Ledger(partial(self._loss_scale, trainer), trainer.strategy.root_device)
        self._attached.callback(self._ledger.close)
        self._watch(pl_module)
        for stepper in self._steppers:
            for optimizer in stepper.optimizers:
                hook = partial(stepper.before_step, partial(self._consume, trainer, pl_module, stepper))
                self._attached.callback(optimizer.register_step_pre_hook(hook).remove)
                self._attached.callback(optimizer.register_step_post_hook(stepper.after_step).remove)
        self._wrap(trainer.precision_plugin, "backward", partial(self._backward, engine))
        if engine is not None:
            self._wrap(engine, "step", partial(self._engine_step, trainer))
        self._wrap(trainer.precision_plugin, "clip_gradients", self._clip_gradients)
        for zeroes in [pl_module, *trainer.strategy._lightning_optimizers, *([] if engine else trainer.optimizers)]:
            self._wrap(zeroes, "zero_grad", partial(self._zero_grad, zeroes))

    def _matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.parameters)

    def _watch(self, module: pl.LightningModule) -> None:
        """Put hooks on the trainable parameters. Called again for each batch, because more may have been unfrozen."""
        assert self._ledger is not None
        for name, found in named_parameters(module):
            # By name: the module of FSDP2 may show the unsharded parameter in the place of the optimizer's.
            param, leaf, _ = self._sharded.get(name, (found, found, None))
            if param.requires_grad and name not in self._watched and self._matches(name):
                self._watched[name] = param
                with torch._C.DisableTorchFunctionSubclass():  # the leaf itself: FSDP2 has several for a parameter
                    self._ledger.watch(name, leaf.requires_grad_())  # FSDP2 would set it in the next forward only

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        self._attached.enter_context(_instead(owner, name, partial(wrapper, getattr(owner, name))))

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._active:
            self._watch(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._finished:
            self._detach()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._active:
            if self._audited:
                self._print(trainer)
            elif self._backwards:
                rank_zero_warn(
                    f"`GradientAudit` saw {self._backwards} backwards and no optimizer step: it has audited nothing."
                )
        self._detach()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._detach()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._detach()

    def _detach(self) -> None:
        """Remove every hook and wrapper, and release the sums."""
        self._attached.close()
        self._ledger = None
        self._steppers = []
        self._watched = {}
        self._sharded = {}

    # -- computed gradients -------------------------------------------------------------------------------------------

    def _backward(
        self, engine: Any, original: Callable[..., None], loss: Tensor, *args: Any, gradient: Any = None, **kwargs: Any
    ) -> None:
        """The precision plugin's backward."""
        self._backwards += 1
        if gradient is not None:
            kwargs["gradient"] = gradient
        elif self._active and engine is not None and loss.requires_grad and loss.numel() == 1:
            loss.register_hook(self._measure_scale)
        try:
            original(loss, *args, **kwargs)
        finally:
            self._measured_scale = None

    def _measure_scale(self, grad: Tensor) -> None:
        self._measured_scale = float(grad)

    def _loss_scale(self, trainer: pl.Trainer) -> float:
        """The divisor of the raw gradients: the loss scale, of the gradient scaler or of the engine."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            return float(scaler.get_scale())
        if not isinstance(trainer.strategy, DeepSpeedStrategy):
            return 1.0
        engine: Any = trainer.strategy.model
        ours = hasattr(engine, "loss_scale_factor")
        # Before the ledger's hook, ours multiplies gradients that lack the loss scale.
        missing = engine.gradient_accumulation.missing_scale() if ours else 1.0
        if self._measured_scale is None:
            # Not manual_backward(); or with `gradient=`; or an inner backward, before the loss has its own gradient.
            if ours:
                return float(running() * missing)
            return float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0
        # DeepSpeed divides the loss by the number of micro-batches. That is not part of the loss scale.
        divided = trainer.accumulate_grad_batches if trainer.strategy.handles_gradient_accumulation else 1
        return self._measured_scale * divided * missing

    def _zero_grad(self, owner: Any, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self._forget(owner)

    @override
    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        self._forget(optimizer)

    def _forget(self, owner: Any) -> None:
        """``owner.zero_grad()`` was called. The owner is an optimizer, or the module for all optimizers."""
        owner = _innermost(owner)
        # An engine shows the user one optimizer, which is not the innermost one.
        is_torchs = isinstance(owner, Optimizer) and not hasattr(owner, "gradient_accumulation")
        for stepper in self._steppers:
            if owner in stepper.optimizers or not is_torchs or len(self._steppers) == 1:
                self._forget_stepper(stepper)

    def _forget_stepper(self, stepper: Stepper) -> None:
        for each in self._with_same_parameters(stepper):
            each.clips.clear()
        if self._ledger is not None:
            self._ledger.forget(self._audited_params(stepper))

    def _with_same_parameters(self, stepper: Stepper) -> list[Stepper]:
        """The steppers that use the same gradients: those of optimizers of the same parameters."""
        return [each for each in self._steppers if each.updated() == stepper.updated()]

    def _audited_params(self, stepper: Stepper) -> dict[str, nn.Parameter]:
        # Not the parameters of this rank's shares: all ranks must choose the same.
        everything = len(self._steppers) == 1
        members = stepper.shares.keys() if stepper.members is None else stepper.members
        return {name: param for name, param in self._watched.items() if everything or id(param) in members}

    def _clip_gradients(
        self,
        original: Callable[..., None],
        optimizer: Any,
        clip_val: int | float | None = 0.0,
        gradient_clip_algorithm: Any = "norm",
    ) -> None:
        original(optimizer, clip_val, gradient_clip_algorithm)
        optimizer = _innermost(optimizer)
        for stepper in self._steppers:
            if clip_val and clip_val > 0 and (optimizer in stepper.optimizers or len(self._steppers) == 1):
                for each in self._with_same_parameters(stepper):
                    each.clips.append(Clip(float(clip_val), "value" if gradient_clip_algorithm == "value" else "norm"))

    # -- consumed gradients -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _consume(self, trainer: pl.Trainer, module: pl.LightningModule, stepper: Stepper, optimizer: Optimizer) -> None:
        if not self._active:
            return
        assert self._ledger is not None
        engine: Any = trainer.strategy.model if isinstance(trainer.strategy, DeepSpeedStrategy) else None
        if stepper.comparison is None:
            params = self._audited_params(stepper)
            updated: Any = module.parameters() if engine is not None else (s.held for s in stepper.shares.values())
            if stepper.members is not None:
                updated = [param for param in updated if id(param) in stepper.members]
            audited = {id(param) for param in params.values()}
            stepper.comparison = Comparison(
                self._ledger,
                params,
                stepper.shares,
                stepper.clippings(engine),
                norm_is_known=all(id(param) in audited for param in updated if param.requires_grad),
                wires={name: sharded.wire for name, sharded in self._sharded.items()}
                if engine is None
                else dict.fromkeys(params, engine.communication_data_type),
                tolerance=self.tolerance,
            )
        scale = getattr(optimizer, "grad_scale", None)  # set by torch's GradScaler for a fused optimizer
        held = [param for group in optimizer.param_groups for param in group["params"]]
        stepper.comparison.consume(held, 1.0 if scale is None else float(scale))
        if engine is None:
            self._conclude(trainer, stepper)

    def _engine_step(self, trainer: pl.Trainer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's step, in which the innermost optimizer may step several times, once per parameter group."""
        result = original(*args, **kwargs)
        for stepper in self._steppers if self._active else ():
            if stepper.comparison is not None:
                self._conclude(trainer, stepper)
                if not hasattr(trainer.strategy.model, "loss_scale_factor"):
                    self._forget_stepper(stepper)  # the step of DeepSpeed's own engine has used up the gradients
        return result

    def _conclude(self, trainer: pl.Trainer, stepper: Stepper) -> None:
        assert stepper.comparison is not None
        results = stepper.comparison.finish(self._audited)
        stepper.comparison = None
        stepper.clips.clear()
        self.results += results
        self._audited += 1
        self._finished = self._audited >= self.steps * len(self._steppers)
        failed = any(not result.passed for result in results)
        if self._finished or (failed and self.on_mismatch == "raise"):
            self._print(trainer)
        if failed:
            message = describe_failure(results)
            if self.on_mismatch == "raise":
                raise GradientMismatchError(message)
            rank_zero_warn(message)

    def _print(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            print_results(self.results, self._audited)


def _innermost(optimizer: Any) -> Any:
    """The optimizer inside Lightning's wrapper, and inside the engine's wrapper of one of several optimizers."""
    optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    return optimizer if part_of(optimizer) is None else optimizer.optimizer


@contextmanager
def _instead(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace ``owner.name`` by ``replacement`` within, on this object only."""
    had = name in owner.__dict__
    before = owner.__dict__.get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
