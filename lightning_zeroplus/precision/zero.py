"""The precision plugin of the ZeRO strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import (
    DeepSpeedPrecision,
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zeroplus.gradients.again import evaluating
from lightning_zeroplus.gradients.dtype import GRAD_DTYPES, match_patterns
from lightning_zeroplus.gradients.patches.step_hooks import users_step_hooks
from lightning_zeroplus.precision.conversions import ConvertsAsUnderDDP, loss_scale_settings
from lightning_zeroplus.precision.loss_scale import ReadOnlyScaler

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_zeroplus.engine.engine import ZeroPlusEngine


class ZeroPlusPrecision(ConvertsAsUnderDDP, DeepSpeedPrecision):
    """Backward, clipping and stepping through a :class:`~lightning_zeroplus.engine.engine.ZeroPlusEngine`.

    :class:`~lightning_zeroplus.ZeroPlusStrategy` chooses it by itself; pass ``precision=`` to the Trainer.

    For parameters whose gradients should have another dtype than the parameters, pass it yourself::

        precision = ZeroPlusPrecision(
            "bf16-true", accumulate_dtype={"head.*": torch.float32}, grad_dtype={"norm.*": None}
        )
        Trainer(strategy="zeroplus_stage2", plugins=[precision])

    Patterns are shell patterns (``*``, ``?``, ``[...]``) for whole names, as in ``named_parameters()``. The first match
    counts. A parameter without a match keeps its ``param.grad_dtype`` if the model has set one, else its own dtype.

    Attributes:
        scaler: In ``"16-mixed"``, the loss scale, to be read as torch's ``GradScaler`` is under DDP; else None.

    Args:
        precision: ``"32-true"``, ``"bf16-true"``, ``"bf16-mixed"``, ``"16-true"`` or ``"16-mixed"``. The ``mixed``
            forms are those of DDP: parameters and gradients in fp32, a forward under ``torch.autocast``, and in
            ``"16-mixed"`` a loss scale. The ``true`` forms have 16-bit parameters; the optimizer updates fp32 master
            weights. ``"64-true"`` is for stage 0, and has to be passed as a plugin: Lightning refuses
            ``Trainer(precision="64-true")`` before it asks the strategy.
        grad_dtype: The dtype in which a gradient is accumulated and reduced, for all parameters or by pattern. None, by
            pattern only: the dtype in which the backward computes it.
        accumulate_dtype: ``torch.float32``, for all parameters or by pattern: their gradients are summed and reduced in
            fp32, and the gradient partitions of all parameters are fp32. ``grad_dtype`` wins where both match.

    Raises:
        ValueError: If ``precision`` is none of these.
        MisconfigurationException: If ``grad_dtype`` is not fp16, bf16 or fp32, or ``accumulate_dtype`` is not fp32.
    """

    def __init__(
        self,
        precision: str,
        grad_dtype: torch.dtype | Mapping[str, torch.dtype | None] | None = None,
        accumulate_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    ) -> None:
        super().__init__(precision)
        self.scaler = ReadOnlyScaler() if precision == "16-mixed" else None
        self._grad_dtype = _by_pattern("grad_dtype", grad_dtype, (*GRAD_DTYPES, None))
        self._accumulate_dtype = _by_pattern("accumulate_dtype", accumulate_dtype, (torch.float32,))

    def _autocast(self, cache_enabled: bool | None = False) -> torch.autocast:
        # As Lightning's plugin of the Trainer: in manual optimization a step may come between two uses of a weight.
        return super()._autocast(cache_enabled)

    @property
    def accumulates_in_fp32(self) -> bool:
        """Whether the gradients of some parameters are summed in fp32 by :attr:`accumulate_dtype`."""
        return bool(self._accumulate_dtype)

    def grad_dtypes(self, module: nn.Module) -> dict[str, torch.dtype | None]:
        """The gradient dtypes of the trainable parameters that the arguments match, by name.

        Raises:
            MisconfigurationException: If a pattern matches no parameter.
        """
        names = [name for name, param in module.named_parameters() if param.requires_grad]
        try:
            return {
                **match_patterns(names, self._accumulate_dtype, "accumulate_dtype"),
                **match_patterns(names, self._grad_dtype, "grad_dtype"),
            }
        except ValueError as error:
            raise MisconfigurationException(str(error))

    @override
    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: pl.LightningModule,
        optimizer: Steppable | None,
        *args: Any,
        gradient: Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Differentiate ``tensor`` as ``torch.Tensor.backward`` would; the engine gets the gradients.

        Args:
            tensor: The loss: one element, or any shape if ``gradient`` is given.
            model: The LightningModule.
            optimizer: Not used: the engine has it.
            *args: Passed to the base class.
            gradient: The vector of the vector-Jacobian product, of ``tensor``'s shape.
            **kwargs: ``retain_graph``, ``create_graph`` and ``inputs``, as for ``torch.Tensor.backward``.
        """
        tensor = as_loss(tensor, gradient)
        if is_overridden("backward", model):
            # It may call loss.backward(): the engine also ends backwards that it did not start.
            model.backward(tensor, *args, **kwargs)
        else:
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, then let the engine step.

        If the closure returns None, because ``training_step`` skipped the batch, the step uses the gradients that are
        there. Without gradients the engine does nothing, like a torch optimizer under DDP.
        """

        def evaluate() -> Any:
            loss = closure()
            self._after_closure(model, optimizer)
            return loss

        engine = cast("ZeroPlusEngine", model.trainer.model)
        optimizer = stepped(optimizer)
        hooks = users_step_hooks(engine, part_of(optimizer), optimizer, evaluate)
        # Lightning's plugin for "16-mixed" steps after the closure, and so calls the hooks after it.
        is_scaled = self.precision == "16-mixed"
        with nullcontext() if is_scaled else hooks:
            result = evaluate()
            optimizer = stepped(optimizer)  # others may have replaced it
            part = part_of(optimizer)
            which: dict[str, Any] = {} if part is None else {"part": part}
            with (
                hooks if is_scaled else nullcontext(),
                evaluating(optimizer if part is None else optimizer.optimizer, result, evaluate),  # type: ignore[attr-defined]
            ):
                engine.step(**which, **kwargs)
        return result

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the global gradient in the next optimizer step.

        Before ``step()`` the gradients may be sharded, or not reduced, so the request is kept until then. It takes no
        reduction besides the scalar all-reduce of the step's gradient norm.

        Args:
            optimizer: The optimizer, wrapped by Lightning or not.
            clip_val: Largest L2 norm or largest absolute value; 0 or a negative value clips nothing.
            gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        """
        if clip_val <= 0:
            return
        from lightning_zeroplus.gradients.clip import Clip

        optimizer = stepped(optimizer)
        accumulation = optimizer.gradient_accumulation  # type: ignore[attr-defined]
        clip = Clip(float(clip_val), GradClipAlgorithmType(gradient_clip_algorithm).value)
        accumulation.engine.clip_gradients(clip, part_of(optimizer))


def part_of(optimizer: Any) -> int | None:
    """The number of this optimizer among several of an engine; None if it is the only one."""
    return getattr(optimizer, "number", None)


def stepped(optimizer: Any) -> Any:
    """See :func:`lightning_zeroplus.engine.optimizer.anew.stepped.stepped`."""
    if hasattr(optimizer, "gradient_accumulation"):
        return optimizer
    from lightning_zeroplus.engine.optimizer.anew import stepped as current

    return current.stepped(optimizer)


def as_loss(tensor: Tensor, gradient: Tensor | None) -> Tensor:
    """The scalar that an engine differentiates for ``tensor.backward(gradient)``.

    Args:
        tensor: The loss: one element, or any shape if ``gradient`` is given.
        gradient: The vector of the vector-Jacobian product, of ``tensor``'s shape.
    """
    return tensor if gradient is None else (tensor * gradient.detach()).sum()


def _by_pattern(argument: str, value: Any, allowed: tuple[torch.dtype | None, ...]) -> dict[str, torch.dtype | None]:
    if value is None:
        return {}
    patterns = dict(value) if isinstance(value, Mapping) else {"*": value}
    for pattern, dtype in patterns.items():
        if not isinstance(pattern, str) or not any(dtype is each for each in allowed):
            raise MisconfigurationException(
                f"`ZeroPlusPrecision({argument}=...)` takes {' or '.join(map(str, allowed))}, or a dict of them by"
                f" pattern of parameter names, not {pattern!r}: {dtype!r}."
            )
    return patterns


#: Plugins of Lightning that say no more than ``Trainer(precision=...)``, but for a ``GradScaler``.
_LIGHTNINGS = (Precision, HalfPrecision, MixedPrecision, DoublePrecision, DeepSpeedPrecision)


def trainer_precision(plugin: Precision | None) -> ZeroPlusPrecision | None:
    """Ours in the place of a plugin of Lightning's.

    Raises:
        MisconfigurationException: For other plugins, which would not be asked; and for a ``GradScaler`` that DeepSpeed
            cannot scale like.
    """
    if plugin is None or isinstance(plugin, ZeroPlusPrecision):
        return plugin
    if type(plugin) not in _LIGHTNINGS:
        raise MisconfigurationException(
            f"`ZeroPlusStrategy` needs a `ZeroPlusPrecision`, not `{type(plugin).__name__}`. Pass"
            " `Trainer(precision=...)` and no precision plugin."
        )
    ours = ZeroPlusPrecision(str(plugin.precision))
    ours.loss_scale = loss_scale_settings(plugin)
    return ours
