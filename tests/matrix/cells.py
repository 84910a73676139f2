"""One cell of the gradient matrix: a real fit on the ranks of a pool, compared with the gradient reference."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zeroplus as zp
from lightning_zeroplus.testing import Reference, train_reference
from tests.support.patterns import BACKWARDS, PATTERNS, batches, build
from tests.support.training import trainer

#: Of weights and batches.
DTYPES = {**dict.fromkeys(("32", "bf16-mixed", "16-mixed"), torch.float32), "bf16": torch.bfloat16, "16": torch.float16}
#: Relative error of the three updates together, and of each gradient norm. fp32: the order of additions. bf16 and fp16:
#: the reference sums the low-precision gradients exactly, the engine rounds each partial sum to 8 or 11 bits, and from
#: the second step on the two forwards see different roundings. One lost backward of four costs 0.1 or more. In mixed
#: precision the kernels round as the reference's, and gradients are summed in fp32; but the reference has no loss
#: scale, and small gradients in fp16 have fewer bits.
BOUNDS = {"32": 2e-6, "bf16-mixed": 2e-6, "16-mixed": 1e-4, "bf16": 1.5e-2, "16": 2e-3}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.125),
    # A large eps: where a gradient is zero but for rounding, Adam would make an update of full size of it.
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.1),
}


@dataclass(frozen=True)
class Cell:
    """Coordinates of a cell."""

    stage: int
    pattern: str
    #: Precision as in ``Trainer(precision=...)``.
    precision: str = "32-true"
    #: ``auto``: ``backward`` at stages 2 and 3, as it is for models that are larger than these.
    reduction: str = "auto"
    optimizer: str = "sgd"
    #: Their number, each with every n-th parameter; all step after the same backwards.
    optimizers: int = 1
    #: Batches per optimizer step. In automatic optimization, ``accumulate_grad_batches``.
    across: int = 1
    automatic: bool = False
    #: Where the loop calls ``zero_grad``; ``discard`` also throws away the gradients of a first pass.
    zero_grad: str = "after"
    #: Whose method it calls: the optimizer's, or the module's.
    zeroes: str = "optimizer"
    offload: str | None = None
    #: ``(limit, algorithm)`` of ``self.clip_gradients``.
    clip: tuple[float, str] | None = None
    #: Settings of the ``zero_optimization`` section.
    zero: dict[str, Any] = field(default_factory=dict, hash=False)
    grad_accum_dtype: str | None = None
    accumulate_dtype: str | None = None
    #: ``communication_data_type`` of the config.
    communication: str | None = None
    bucket_buffers: int = 2
    #: ``all``: a ``coalesce()`` around the backwards of a batch; ``backwards``: with their number; ``budget``: of about
    #: half of the gradients; ``no_sync``: around all but the last.
    window: str | None = None

    @property
    def kind(self) -> str:
        """``32``, ``bf16``, ``16``, ``bf16-mixed`` or ``16-mixed``."""
        return self.precision.removesuffix("-true")

    @property
    def is_fp16(self) -> bool:
        """Whether fp16 kernels run."""
        return self.precision.startswith("16")

    def autocast(self) -> Any:
        """Around a step, as Lightning's plugin for DDP has it."""
        if not self.kind.endswith("-mixed"):
            return contextlib.nullcontext()
        return torch.autocast("cpu", DTYPES[self.kind.removesuffix("-mixed")], cache_enabled=False)

    @property
    def batch_count(self) -> int:
        # In automatic optimization the last window is incomplete: Lightning steps at the end of the epoch.
        return 3 * self.across - (1 if self.automatic and self.across > 1 else 0)

    def steps_at(self, index: int) -> bool:
        """Whether the optimizer steps after the batch of this index."""
        return (index + 1) % self.across == 0 or index == self.batch_count - 1

    def config(self) -> dict[str, Any]:
        """A config with buckets of several parameters, smaller than the largest, and everything partitioned."""
        zero: dict[str, Any] = {"reduce_bucket_size": 120}
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = 0
        config: dict[str, Any] = {"zero_optimization": zero | self.zero}
        if self.bucket_buffers != 2:
            config["zeroplus"] = {"bucket_buffers": self.bucket_buffers}
        if self.is_fp16:
            config["fp16"] = {"loss_scale": 128}
        if self.grad_accum_dtype is not None:
            config["data_types"] = {"grad_accum_dtype": self.grad_accum_dtype}
        if self.communication is not None:
            config["communication_data_type"] = self.communication
        return config


class Loop(pl.LightningModule):
    """A user's module, in manual or automatic optimization."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell
        self.automatic_optimization = cell.automatic
        self.net = build(cell.pattern)
        self.after_steps: list[list[Tensor]] = []
        self.norms: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor | None:
        pattern = PATTERNS[self.cell.pattern]
        if self.cell.automatic:
            losses: list[Tensor] = []
            pattern(self.net, batch, lambda loss, **kwargs: losses.append(loss), index)
            return sum(losses[1:], losses[0])
        optimizers: Any = self.optimizers(use_pl_optimizer=True)
        optimizers = optimizers if self.cell.optimizers > 1 else [optimizers]
        zeroes: list[Any] = [self] if self.cell.zeroes == "module" else optimizers
        backward = _direct_backward if self.cell.pattern == "direct" else self.manual_backward
        if self.cell.zero_grad == "discard":
            pattern(self.net, batch, backward, index)
        if self.cell.zero_grad in ("before", "discard") and index % self.cell.across == 0:
            for each in zeroes:
                each.zero_grad()
        with self.window():
            pattern(self.net, batch, self.without_sync(backward), index)
        if self.cell.steps_at(index):
            for optimizer in optimizers:
                if self.cell.clip is not None:
                    self.clip_gradients(optimizer, self.cell.clip[0], self.cell.clip[1])
                optimizer.step()
            for each in zeroes if self.cell.zero_grad == "after" else ():
                each.zero_grad()
        return None

    def window(self) -> Any:
        strategy: Any = self.trainer.strategy
        match self.cell.window:
            case "all":
                return strategy.coalesce()
            case "backwards":
                return strategy.coalesce(backwards=BACKWARDS[self.cell.pattern])
            case "budget":
                return strategy.coalesce(max_bytes=1000)
        return contextlib.nullcontext()

    def without_sync(self, backward: Any) -> Any:
        calls = 0

        def all_but_the_last(loss: Tensor, **kwargs: Any) -> None:
            nonlocal calls
            calls += 1
            waits = self.cell.window == "no_sync" and calls < BACKWARDS[self.cell.pattern]
            with self.trainer.strategy.block_backward_sync() if waits else contextlib.nullcontext():
                backward(loss, **kwargs)

        return all_but_the_last

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.cell.steps_at(index):
            self.after_steps.append(trained_weights(self.net, self.trainer.strategy.model))
            self.note_norms()

    def note_norms(self) -> None:
        grad_norm = getattr(self.trainer.strategy, "grad_norm", lambda optimizer: None)
        optimizers: Any = self.optimizers()
        norms = [grad_norm(each) for each in (optimizers if self.cell.optimizers > 1 else [None])]
        if None not in norms:
            self.norms.append(math.hypot(*norms))

    def configure_optimizers(self) -> Any:
        make = OPTIMIZERS[self.cell.optimizer]
        made = [
            make(part)
            for part in _split([param for param in self.parameters() if param.requires_grad], self.cell.optimizers)
        ]
        return made if self.cell.optimizers > 1 else made[0]


def _split(params: list[Any], parts: int) -> list[list[Any]]:
    return [params[part::parts] for part in range(parts)]


def _direct_backward(loss: Tensor, **kwargs: Any) -> None:
    loss.backward(**kwargs)


def trained_weights(net: nn.Module, engine: Any) -> list[Tensor]:
    """The full fp32 weights: master weights where there are some, gathered where they are partitioned."""
    masters: dict[int, Tensor] = {}
    optimizer = getattr(engine, "optimizer", None)
    for low, high in zip(getattr(optimizer, "fp16_groups", []), getattr(optimizer, "fp32_groups", []), strict=False):
        masters |= {id(a): b for a, b in zip(low, high, strict=True)}  # stage 0 in low precision
    return [_full(param, masters).cpu() for param in net.parameters()]


def _full(param: nn.Parameter, masters: dict[int, Tensor]) -> Tensor:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    if id(param) in masters:
        return masters[id(param)].detach().clone()
    if param.requires_grad and param.dtype != torch.float32:
        full = safe_get_full_fp32_param(param)
        if full is not None:
            return full.detach().float().reshape(getattr(param, "ds_shape", param.shape)).clone()
    if hasattr(param, "ds_id"):
        with GatheredParameters([param]):
            return param.detach().float().clone()
    return param.detach().float().clone()


class Outcome(NamedTuple):
    """How far a cell is from the reference, on one rank."""

    #: Whether the weights after the first step are the reference's to the bit.
    first_step_exact: bool
    #: Distance of the weights after the last step over the reference's distance from the start.
    error: float
    norm_error: float
    #: Names of trainable parameters that stand still where the reference moves.
    frozen: list[str]


def strategy_for(cell: Cell) -> Any:
    """The strategy under test."""
    if cell.is_fp16:
        pretend_fp16_kernels()
    return zp.ZeroPlusStrategy(
        stage=cell.stage,
        reduction="backward" if cell.reduction == "auto" and cell.stage >= 2 else cell.reduction,  # type: ignore[arg-type]
        accumulate_dtype=cell.accumulate_dtype,
        offload=cell.offload,  # type: ignore[arg-type]
        config=cell.config(),
    )


def pretend_fp16_kernels() -> None:
    """A fake: where the CPU has no fast fp16 kernels, torch's slow ones show that our arithmetic is right."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True


def trainer_for(cell: Cell, make_strategy: Callable[[Cell], Any], **kwargs: Any) -> Any:
    """A Trainer on all ranks, for one epoch."""
    return trainer(
        make_strategy(cell),
        precision=cell.precision,
        max_epochs=1,
        use_distributed_sampler=False,
        accumulate_grad_batches=cell.across if cell.automatic else 1,
        **kwargs,
    )


def run_cell(cell: Cell, make_strategy: Callable[[Cell], Any] = strategy_for) -> Outcome:
    """Fit on this rank's batches and compare with the reference."""
    data = batches(cell.batch_count, dist.get_world_size())
    module = Loop(cell)
    run = trainer_for(cell, make_strategy)
    run.fit(module, DataLoader([ranks[dist.get_rank()] for ranks in data], batch_size=None))
    return _compare(cell, module, _reference(cell, data))


def _reference(cell: Cell, data: list[Any]) -> Reference:
    net = build(cell.pattern).to(DTYPES[cell.kind])

    def pattern(net: nn.Module, batch: Any, backward: Any, index: int) -> None:
        with cell.autocast():
            PATTERNS[cell.pattern](net, batch, backward, index)

    def scaled(net: nn.Module, batch: Any, backward: Any, index: int) -> None:
        # Lightning divides by accumulate_grad_batches, also in an incomplete window.
        pattern(net, batch, lambda loss, **kw: backward(loss / cell.across, **kw), index)

    trained: list[nn.Parameter] = []

    def make_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        trained.extend(params)
        return OPTIMIZERS[cell.optimizer](params)

    def clip(params: list[nn.Parameter]) -> None:
        limit, algorithm = cell.clip or (math.inf, "norm")
        clip_ = {"norm": torch.nn.utils.clip_grad_norm_, "value": torch.nn.utils.clip_grad_value_}[algorithm]
        for part in _split(trained, cell.optimizers):
            clip_(part, limit)

    return train_reference(
        net,
        make_optimizer,
        scaled if cell.automatic else pattern,
        [[tuple(part.to(DTYPES[cell.kind]) for part in batch) for batch in ranks] for ranks in data],
        steps_at=cell.steps_at,
        clip=None if cell.clip is None else clip,
    )


def _compare(cell: Cell, module: Loop, reference: Reference) -> Outcome:
    start = [p.detach() for p in build(cell.pattern).parameters()]
    got, want = module.after_steps, reference.params
    assert len(got) == len(want) == 3, (len(got), len(want))
    names = [name for name, _ in build(cell.pattern).named_parameters()]
    moved = [not torch.equal(w, s) for w, s in zip(want[-1], start, strict=True)]
    stands = [torch.equal(g, s) for g, s in zip(got[-1], start, strict=True)]
    return Outcome(
        first_step_exact=all(torch.equal(g, w) for g, w in zip(got[0], want[0], strict=True)),
        error=_distance(got[-1], want[-1]) / _distance(start, want[-1]),
        norm_error=max((abs(g - w) / w for g, w in zip(module.norms, reference.norms, strict=False)), default=0.0),
        frozen=[name for name, m, s in zip(names, moved, stands, strict=True) if m and s],
    )


def _distance(left: list[Tensor], right: list[Tensor]) -> float:
    return float(torch.stack([(a - b).square().sum() for a, b in zip(left, right, strict=True)]).sum().sqrt())
