"""Whole weights stay from one backward to the next of the same step: gathered once, never outdated, and given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zeroplus.fsdp.late_grads import groups
from tests.fsdp.training import (
    AnnouncedWindowTask,
    CountedGather,
    ManualTask,
    Task,
    WindowTask,
    fit,
    ours,
    relative_error,
    weights,
)

STEPS, BACKWARDS, UNITS = 3, 4, 3


class _Kept:
    """Mixin: notes after each backward how many bytes of whole weights there are."""

    def on_train_start(self: Any) -> None:
        self.gathers, self.bytes = CountedGather(), []
        self.gathers.watch(self)

    def on_after_backward(self: Any) -> None:
        units = [unit for unit in self.modules() if hasattr(unit, "unshard")]
        params = [param for unit in units for group in groups(unit) for param in group.fsdp_params]
        assert all(param.sharded_state.name == "SHARDED" for param in params), "the module has its sharded parameters"
        self.bytes.append(sum(out.untyped_storage().size() for param in params for out in param.all_gather_outputs))


class _Accumulating(_Kept, Task):
    pass


class _Window(_Kept, WindowTask):
    pass


class _Announced(_Kept, AnnouncedWindowTask):
    pass


class _NoSync(_Kept, ManualTask):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        chunks = self.chunks(batch)
        with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            for chunk in chunks[:-1]:
                self.manual_backward(self.loss(chunk) / BACKWARDS)
        self.manual_backward(self.loss(chunks[-1]) / BACKWARDS)
        self.optimizers().step()
        self.optimizers().zero_grad()


class _Writing(_Accumulating):
    """Writes one weight after the second of four micro-batches."""

    how = "sharded"

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % BACKWARDS == 1:
            weight = next(self.net.parameters())
            with torch.no_grad():
                if self.how == "data":
                    weight.data = weight.data * 0.9
                else:
                    weight.mul_(0.9)


class _WritingData(_Writing):
    how = "data"


class _Evaluating(_Accumulating):
    """Evaluates after the second micro-batch; that gives the weights back."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % BACKWARDS == 1:
            with torch.no_grad():
                self.losses.append(float(self.loss(batch)))


class _GatheringAlone(_Accumulating):
    """Rank 1 runs the network once more, alone, between two micro-batches."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % BACKWARDS == 1 and self.global_rank == 1:
            with torch.no_grad():
                self.loss(batch)


_TASKS = {
    "accumulating": _Accumulating,
    "window": _Window,
    "announced": _Announced,
    "no_sync": _NoSync,
    "writing": _Writing,
    "writing_data": _WritingData,
    "evaluating": _Evaluating,
    "gathering_alone": _GatheringAlone,
}

#: Further gathers. The third step has only two micro-batches, because the epoch ends: nothing is kept after the second.
_MORE = {"writing": 2, "writing_data": 2, "evaluating": 3 * UNITS, "gathering_alone": 3 * UNITS}


def _run(name: str, reshard: bool, reduction: str) -> tuple[int, list[int], Tensor]:
    task: Any = _TASKS[name]()
    count = BACKWARDS if isinstance(task, _Accumulating) else 1
    strategy = ours(reshard_after_forward=reshard, reduction=reduction)
    fit(strategy, task, max_steps=STEPS, accumulate_grad_batches=count)
    return task.gathers.calls, task.bytes, weights(task)


@pytest.mark.parametrize("reduction", ["backward", "step"])
@pytest.mark.parametrize("name", _TASKS)
def test_they_are_gathered_once_per_step(ranks2: Any, name: str, reduction: str) -> None:
    kept, resharded = ranks2.run(_run, name, False, reduction), ranks2.run(_run, name, True, reduction)
    for (calls, there, trained), (_, never, want) in zip(kept, resharded, strict=True):
        # Ranks that differ reduce at another moment, and add in another order.
        assert torch.equal(trained, want) or (name == "gathering_alone" and relative_error(trained, want) < 1e-6)
        assert calls == UNITS * STEPS + _MORE.get(name, 0)
        assert there[:BACKWARDS] == [there[0]] * (BACKWARDS - 1) + [0 if name != "window" else there[0]]
        assert there[0] > 0
        assert not any(never)


class _Uneven(ManualTask):
    """Rank 0 has one backward per step, and rank 1 another one before it, in `block_backward_sync()`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1:
            with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
                self.manual_backward(self.loss(batch) / 2)
        self.manual_backward(self.loss(batch) / (1 + self.global_rank))
        self.optimizers().step()
        self.optimizers().zero_grad()


def _uneven(reshard: bool) -> Tensor:
    return weights(fit(ours(reshard_after_forward=reshard), _Uneven(), max_steps=STEPS))


def test_ranks_that_gather_alike_may_have_been_in_no_sync_or_not(ranks2: Any) -> None:
    for trained, want in zip(ranks2.run(_uneven, False), ranks2.run(_uneven, True), strict=True):
        assert relative_error(trained, want) < 1e-6
