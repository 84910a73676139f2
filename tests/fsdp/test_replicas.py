"""HSDP on two replicas of two shards: one all-reduce between replicas per step, and the parameters of DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zeroplus.testing import RankPool
from tests.fsdp.training import DIM, Block, ManualTask, Net, Task, loader, ours, relative_error, trainer, weights

BOUND = 1e-6
_STEPS = 2
_SAMPLES = 4 * 4 * 16  # of a step: four batches on four ranks


def _eight_units() -> nn.Module:
    return Net(blocks=7)


class Accumulates(Task):
    backwards = 4

    def __init__(self, make_net: Callable[[], nn.Module] = _eight_units) -> None:
        super().__init__(make_net=make_net)


class _Halves(nn.Module):
    """One unit; a batch uses one of two layers, of the same size, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.temperature = nn.Linear(DIM, 4), nn.Linear(DIM, 4), nn.Parameter(torch.tensor(1.0))
        self.use = (True, True)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.use
        return (self.a(x) if a else 0) + (self.b(x) * self.temperature if b else 0)  # type: ignore[return-value]


class UsesHalves(Accumulates):
    """The order in which FSDP2 adds up is that of the parameters with a gradient: here it is another each time."""

    def __init__(self) -> None:
        super().__init__(_Halves)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.use = ((True, False), (False, True), (True, True), (False, True))[batch_idx % 4]  # type: ignore[assignment]
        return super().training_step(batch, batch_idx)


class EndsWithout(UsesHalves):
    """The last backward of a step reaches nothing of what waits, or not the unit at all; a frozen layer waits, too."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.a.requires_grad_(batch_idx % 4 == 0)  # type: ignore[union-attr, operator]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, 0 if batch_idx % 4 == 0 else 1)
        return torch.zeros((), requires_grad=True) if batch_idx == 7 else loss


class RanksDiffer(Accumulates):
    """What came before is expected of the rank that differs: it takes part with gradients of zero."""

    steps = 8

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        net: Any = self.net
        blocks = net.blocks
        try:
            if batch_idx >= 24 and batch_idx % 4 == self.global_rank:
                net.blocks = blocks[1:]
            return super().training_step(batch, batch_idx)
        finally:
            net.blocks = blocks


class Reads(Accumulates):
    """Gradients are read after the third of four backwards, and zeroed after the first."""

    def on_after_backward(self) -> None:
        at = self.trainer.fit_loop.epoch_loop.batch_idx % 4
        if at == 0:
            self.trainer.optimizers[0].zero_grad()
        if at == 2:
            assert all(param.grad is not None and param.grad.norm() > 0 for param in self.parameters())


class ByHand(ManualTask):
    backwards = 4
    window: dict[str, Any] = {"max_bytes": 1}

    def __init__(self) -> None:
        super().__init__(make_net=_eight_units)

    def differentiate(self, batch: Any) -> None:
        for chunk in self.chunks(batch):
            self.manual_backward(self.loss(chunk) / self.backwards)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        if not hasattr(strategy, "coalesce"):
            self.differentiate(batch)
        else:
            self.in_window(strategy, batch)
        self.optimizers().step()
        self.optimizers().zero_grad()

    def in_window(self, strategy: Any, batch: Any) -> None:
        with strategy.coalesce(**self.window):
            self.differentiate(batch)


class Plainly(ByHand):
    def in_window(self, strategy: Any, batch: Any) -> None:
        self.differentiate(batch)


class Announced(ByHand):
    window = {"backwards": 4, "max_bytes": 1}


class Raises(ByHand):
    """In a window, and in a backward: then the step is made as if nothing had been."""

    def in_window(self, strategy: Any, batch: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            with strategy.coalesce(max_bytes=1):
                self.differentiate(batch)
                raise ZeroDivisionError
        handle = self.net.blocks[3].register_full_backward_pre_hook(lambda module, grad: 1 / 0)  # type: ignore[union-attr,index]
        with pytest.raises(ZeroDivisionError):
            with strategy.coalesce(max_bytes=1):
                self.differentiate(batch)
        handle.remove()
        groups = [group for _, group in strategy._gradients.units.groups()]
        assert all(group._partial_reduce_output is None for group in groups)
        assert all(param.grad is None for param in self.parameters())
        super().in_window(strategy, batch)


class Result(NamedTuple):
    error: float
    moved: float
    reduce_scatters: float
    all_reduces: float
    """Between replicas, per step."""


def _compare(program: Callable[[], Any], reduction: str, precision: str = "32-true") -> Result:
    accumulated = 4 if program().automatic_optimization else 1
    steps = getattr(program, "steps", _STEPS)
    options = {"max_steps": steps, "accumulate_grad_batches": accumulated, "precision": precision}
    start = weights(program())
    # Where a rank does not use all parameters in the last backward, DDP fails, or loses what it has accumulated.
    reference: Any = ours(reduction="step") if program in (UsesHalves, EndsWithout, RanksDiffer) else "ddp"
    expected = program()
    trainer(reference, **{**options, "precision": "32-true"}).fit(expected, loader(steps * _SAMPLES))
    want = weights(expected)
    counted, original = [], dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        counted.append(group is not None and group.group_desc == "mesh_replicate")
        return original(tensor, *args, **kwargs)

    task = program()
    with mock.patch.object(dist, "all_reduce", all_reduce):
        trainer(ours(wrap=Block, replicate_size=2, reduction=reduction), **options).fit(task, loader(steps * _SAMPLES))
    got = weights(task)
    return Result(
        relative_error(got, want), relative_error(want, start), task.counted.calls / steps, sum(counted) / steps
    )


#: By name: the program, how it reduces, and how often: reduce-scatters and all-reduces per step.
CASES: dict[str, tuple[Callable[[], Any], str, tuple[int, int] | None]] = {
    "accumulates": (Accumulates, "backward", (32, 8)),
    "at the step": (Accumulates, "step", (8, 8)),
    "bounded window": (ByHand, "backward", (40, 8)),
    "no window": (Plainly, "backward", (32, 32)),
    "announced": (Announced, "backward", (32, 8)),
    "halves": (UsesHalves, "backward", (4, 1)),
    "ends without": (EndsWithout, "backward", None),
    "reads": (Reads, "backward", None),
    "ranks differ": (RanksDiffer, "backward", None),
    "raises": (Raises, "backward", None),
}


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("name", CASES)
def test_one_all_reduce_per_step(ranks: Callable[[int], RankPool], name: str) -> None:
    program, reduction, counts = CASES[name]
    for result in ranks(4).run(_compare, program, reduction):
        assert result.error <= BOUND < result.moved
        assert counts is None or (result.reduce_scatters, result.all_reduces) == counts


class _Fails(Accumulates):
    """Fails in the third of four backwards of the first step; two wait, reduced among the shards alone.

    Then it steps by hand: the automatic optimization zeroes gradients before the first backward, this after the step.
    """

    fails = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails and batch_idx == 2:
            strategy: Any = self.trainer.strategy
            self.waited = [group._partial_reduce_output is not None for _, group in strategy._gradients.units.groups()]
            raise ZeroDivisionError
        loss = super().training_step(batch, batch_idx)
        if self.fails:
            return loss
        self.manual_backward(loss / self.backwards)
        if batch_idx % self.backwards == self.backwards - 1:
            self.optimizers().step()  # type: ignore[union-attr]
            self.optimizers().zero_grad()  # type: ignore[union-attr]
        return None


def _fit_after_a_failure() -> tuple[float, float]:
    start, expected, task = weights(_Fails()), Accumulates(), _Fails()
    accumulated = {"max_steps": _STEPS, "accumulate_grad_batches": 4}
    trainer("ddp", **accumulated).fit(expected, loader(_STEPS * _SAMPLES))
    with pytest.raises(ZeroDivisionError):
        trainer(ours(wrap=Block, replicate_size=2, reduction="backward"), **accumulated).fit(
            task, loader(_STEPS * _SAMPLES)
        )
    assert all(task.waited), "nothing waited for the other replica"
    task.fails = task.automatic_optimization = False
    trainer(ours(wrap=Block, replicate_size=2), max_steps=_STEPS).fit(task, loader(_STEPS * _SAMPLES))
    want = weights(expected)
    return relative_error(weights(task), want), relative_error(want, start)


@pytest.mark.slow
def test_an_exception_while_accumulating_leaves_nothing_for_the_next_fit(ranks: Callable[[int], RankPool]) -> None:
    for error, moved in ranks(4).run(_fit_after_a_failure):
        assert error <= BOUND < moved
