"""GradientNorms: norms of the averaged gradients, and where a gradient that is not finite comes from."""

from __future__ import annotations

import cmath
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_zeroplus.fsdp.whole.layout import as_stored
from lightning_zeroplus.gradients.clip import Clip
from lightning_zeroplus.precision.zero import part_of
from lightning_zeroplus.strategy.deepspeed.trainer import ZeroPlusStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

_SHOWN = 5


class NotFinite(NamedTuple):
    """A gradient with NaN or infinity, as a backward has left it on one rank, before any reduction.

    Attributes:
        step: The number of optimizer steps before it.
        backward: The number of the backward since the last step, from 1 on.
        rank: The rank.
        parameter: The parameter's name.
    """

    step: int
    backward: int
    rank: int
    parameter: str


class GradientNorms(Callback):
    """Logs L2 norms of the averaged gradients, and names the origin of gradients that are not finite.

    The norms are those that DDP has in ``on_before_optimizer_step``: averaged over the ranks, without a loss scale,
    before the Trainer clips them. Of several optimizers, they are of the parameters of the optimizer that steps. A
    logged step sums the squares of what each rank keeps of a gradient, and takes one all-reduce of one vector, with an
    element for each pattern. Other steps take none. Nothing is gathered.

    - Loggers get ``grad_norm/PATTERN`` for every ``log_every_n_steps``-th optimizer step. The logged step is the number
      of optimizer steps before it.
    - If a gradient was NaN or infinite since the last logged step, rank 0 warns, and names the parameters, the ranks,
      the backwards and the steps, the first ones first. For this a hook reads each gradient in each backward once.

    It works with ``ZeroPlusStrategy``, ``ZeroPlusFSDPStrategy``, DDP and a single device.

    Args:
        patterns: Shell patterns of names of parameters or modules, such as ``"encoder"``, ``"*.bias"`` or
            ``"layers.0.*"``. Each gives one norm, over the parameters that it matches and those below the modules that
            it matches. ``"*"`` is the norm of all.
        find_not_finite: Look for gradients that are not finite.

    Raises:
        ValueError: If ``patterns`` are no patterns.
        MisconfigurationException: At the start of a fit, if a pattern matches no trainable parameter, or the strategy
            has unknown gradients.

    Attributes:
        norms: The norms of the last logged step, by pattern; the same on all ranks.
        not_finite: The gradients of this fit that were not finite; the same on all ranks.

    Example::

        Trainer(strategy="zeroplus_stage3", callbacks=[zp.GradientNorms(["*", "encoder", "*.bias"])]).fit(module)
    """

    def __init__(self, patterns: str | Sequence[str] = "*", find_not_finite: bool = True) -> None:
        listed = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(listed, (list, tuple)) or not listed or not all(isinstance(each, str) for each in listed):
            raise ValueError(f"zp.GradientNorms(patterns={patterns!r}): give a pattern of names, or a list of them.")
        self.patterns = list(dict.fromkeys(listed))
        self.find_not_finite = find_not_finite
        self.norms: dict[str, float] = {}
        self.not_finite: list[NotFinite] = []
        self._hooks: list[Any] = []
        self._reset()

    def _reset(self) -> None:
        self._backward = 0
        self._reached: list[tuple[int, int, Tensor]] = []  # backward, parameter, largest absolute value
        self._steps: list[tuple[int, list[tuple[int, int]], Tensor]] = []
        self._params: list[nn.Parameter] = []  # of FSDP2 the sharded ones, wherever the module has others

    # -- the fit ------------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reset()
        self.norms, self.not_finite = {}, []
        if not isinstance(
            trainer.strategy, (ZeroPlusStrategy, ModelParallelStrategy, DDPStrategy, SingleDeviceStrategy)
        ):
            raise MisconfigurationException(
                f"`GradientNorms` does not know where `{type(trainer.strategy).__name__}` keeps gradients. Use"
                " `zeroplus_stage0` to `zeroplus_stage3`, `zeroplus_fsdp`, or `ddp`."
            )
        for unit in pl_module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # a root stays unsharded after an evaluation
        named = list(pl_module.named_parameters())
        self._params = [param for _, param in named]
        self._names = [name for name, _ in named]
        self._members = [[_matches(name, pattern) for name in self._names] for pattern in self.patterns]
        for pattern, members in zip(self.patterns, self._members, strict=True):
            if not any(is_member and p.requires_grad for is_member, (_, p) in zip(members, named, strict=True)):
                raise MisconfigurationException(
                    f"`GradientNorms(patterns=...)`: {pattern!r} matches no trainable parameter, nor a module with one."
                    f" Names are {', '.join(map(repr, self._names[:_SHOWN]))}, ..."
                )
        if self.find_not_finite:
            for index, (_, param) in enumerate(named):
                if param.requires_grad:
                    self._hooks.append(param.register_hook(self._hook(index)))

    def _hook(self, index: int) -> Any:
        def note(grad: Tensor) -> None:
            is_plain = type(grad) is Tensor and grad.layout is torch.strided and not grad.requires_grad
            if is_plain and _is_surely_finite(grad):
                return  # true of most gradients; the contexts below would add a third to the time
            grad = grad.detach()
            with torch.no_grad(), as_stored():
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                if local.numel() and not local.is_sparse and not _is_surely_finite(local):
                    self._reached.append((self._backward, index, torch.linalg.vector_norm(local, torch.inf).float()))

        return note

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._backward += 1

    @override
    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        step = trainer.global_step
        if self._reached:
            places = [(backward, index) for backward, index, _ in self._reached]
            self._steps.append((step, places, torch.stack([largest for _, _, largest in self._reached]).isfinite()))
        self._backward, self._reached = 0, []
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector of the Trainer
        if not every or (step + 1) % every:
            return
        self.norms, are_bad = self._measure(trainer, optimizer)
        if are_bad:
            self._find(trainer)
        self._steps.clear()
        for logger in trainer.loggers:
            logger.log_metrics({f"grad_norm/{pattern}": norm for pattern, norm in self.norms.items()}, step=step)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self._reset()

    # -- norms --------------------------------------------------------------------------------------------------------

    def _measure(self, trainer: pl.Trainer, optimizer: Any) -> tuple[dict[str, float], bool]:
        """The norms, and whether a gradient was not finite since the last time; one all-reduce."""
        strategy: Any = trainer.strategy
        if isinstance(strategy, ZeroPlusStrategy):
            parts, scale, clip, stepped = self._of_engine(strategy.model, trainer.global_rank, part_of(optimizer))
        else:
            held = {id(param) for group in optimizer.param_groups for param in group["params"]}
            stepped = {index for index, param in enumerate(self._params) if id(param) in held}
            parts, scale, clip = list(_stored(self._params, trainer.global_rank)), 1.0, None
        # The squares of what the optimizer steps: of all, and of each pattern. And gradients that were not finite.
        sums = torch.zeros(len(self.patterns) + 2, dtype=torch.float64, device=strategy.root_device)
        for index, part in parts:
            if index in stepped:
                square = _square(part, scale, clip).to(sums.device)
                sums[0] += square
                for column, members in enumerate(self._members, 1):
                    if members[index]:
                        sums[column] += square
        for _, _, finite in self._steps:
            sums[-1] += finite.logical_not().sum().to(sums.device)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        total, *squares, bad = sums.tolist()
        factor = 1.0
        if clip is not None and clip.algorithm == "norm":
            factor = min(1.0, clip.limit / (total**0.5 + 1e-6))
        norms = {
            pattern: factor * square**0.5
            for pattern, square, members in zip(self.patterns, squares, self._members, strict=True)
            if any(members[index] for index in stepped)
        }
        return norms, bool(bad)

    def _of_engine(
        self, engine: Any, rank: int, part: int | None
    ) -> tuple[list[tuple[int, Tensor]], float, Clip | None, set[int]]:
        """This rank's gradients, their scale, what clips them in the step, and the parameters that are stepped."""
        accumulation = engine.gradient_accumulation
        own = accumulation.own_gradients(part)
        order = {id(param): index for index, param in enumerate(self._params)}
        numbers = [order[id(param)] for param in accumulation.params]
        stepped = {numbers[index] for index in accumulation.members(part)}
        is_counted = rank == 0 or not own.are_whole
        parts = [(numbers[index], gradient) for index, gradient in own.parts] if is_counted else []
        return parts, own.scale, own.clips.get(part), stepped

    # -- gradients that are not finite --------------------------------------------------------------------------------

    def _find(self, trainer: pl.Trainer) -> None:
        mine = [
            NotFinite(step, places[place][0], trainer.global_rank, self._names[places[place][1]])
            for step, places, finite in self._steps
            for place in finite.logical_not().nonzero().flatten().tolist()
        ]
        found: list[Any] = [mine]
        if dist.is_available() and dist.is_initialized():
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, mine)
        latest = sorted(each for ranks in found for each in ranks)
        self.not_finite += latest
        lines = [
            f"{each.parameter!r} on rank {each.rank}, in backward {each.backward} of step {each.step}"
            for each in latest[:_SHOWN]
        ]
        more = f", and {len(latest) - _SHOWN} more" if len(latest) > _SHOWN else ""
        rank_zero_warn(f"Gradients with NaN or infinity, before any reduction: {'; '.join(lines)}{more}.")


def _is_surely_finite(grad: Tensor) -> bool:
    """Whether the sum shows that all elements are finite. On a GPU it is not asked: the host would have to wait.

    A sum is NaN or infinite if an element is. It may also overflow: then the largest absolute value decides. On the CPU
    that takes forty times as long.
    """
    return grad.is_cpu and cmath.isfinite(grad.sum().item())


def _square(part: Tensor, scale: float, clip: Clip | None) -> Tensor:
    if clip is not None and clip.algorithm == "value":
        part, scale = (part.float() / scale).clamp(-clip.limit, clip.limit), 1.0
    kind = torch.complex128 if part.is_complex() else torch.float64
    return (torch.linalg.vector_norm(part, dtype=kind) / scale).square()


def _matches(name: str, pattern: str) -> bool:
    """Whether ``pattern`` matches a parameter or a module that it is below."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


def _stored(params: Sequence[nn.Parameter], rank: int) -> Iterator[tuple[int, Tensor]]:
    """What this rank counts of each gradient of DDP or FSDP2."""
    with as_stored():
        for index, param in enumerate(params):
            grad: Any = param.grad
            if isinstance(grad, DTensor):
                places = zip(grad.placements, grad.device_mesh.get_coordinate() or (), strict=True)
                if not any(placement.is_replicate() and place for placement, place in places):
                    yield index, grad.to_local()
            elif grad is not None and rank == 0:
                yield index, grad.coalesce().values() if grad.is_sparse else grad
