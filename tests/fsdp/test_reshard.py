"""`reshard_after_forward`: how often weights are gathered, and that what stays whole is never outdated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

import lightning_zeroplus as zp
from tests.fsdp.training import CountedGather, ManualTask, Task, fit, ours, weights


class _TwoForwards(ManualTask):
    """Two forwards, then their backwards; and a forward that no backward follows, right before the step."""

    backwards = 2

    def training_step(self, batch: Any, batch_idx: int) -> None:
        losses = [self.loss(chunk) for chunk in self.chunks(batch)]
        for loss in losses:
            self.manual_backward(loss / 2)
        self.loss(batch)
        self.optimizers().step()
        self.optimizers().zero_grad()


_TASKS: dict[str, type[Task]] = {"automatic": Task, "several_backwards": ManualTask, "two_forwards": _TwoForwards}


def _run(name: str, *settings: bool | None) -> list[tuple[int, Tensor]]:
    """All-gathers of a fit, and its weights, for each of these settings."""
    found = []
    for reshard in settings:
        task, counted = _TASKS[name](), CountedGather()
        task.on_train_start = lambda task=task, counted=counted: counted.watch(task)  # type: ignore[method-assign]
        fit(ours(reshard_after_forward=reshard), task, max_steps=3)
        found.append((counted.calls, weights(task)))
    return found


@pytest.mark.parametrize("name", _TASKS)
def test_weights_that_stay_are_gathered_once_and_are_never_outdated(ranks2: Any, name: str) -> None:
    for kept, resharded in ranks2.run(_run, name, False, True):
        assert torch.equal(kept[1], resharded[1])
        assert 0 < kept[0] < resharded[0]


def test_in_automatic_optimization_a_step_gathers_each_unit_once_or_twice(ranks2: Any) -> None:
    for (once, _), (twice, _) in ranks2.run(_run, "automatic", False, True):
        assert twice == 2 * once


def _chosen(free_on_rank_1: int) -> int:
    """All-gathers with no setting, where one rank has so many bytes of free memory."""
    free = SimpleNamespace(available=free_on_rank_1 if torch.distributed.get_rank() == 1 else 2**40)
    with patch.object(psutil, "virtual_memory", lambda: free):
        ((count, _),) = _run("automatic", None)
    return count


def test_without_a_setting_they_stay_if_all_ranks_have_room(ranks2: Any) -> None:
    whole = 4 * sum(param.numel() for param in Task().parameters())
    (once, _), (twice, _) = ranks2.run(_run, "automatic", False, True)[0]
    for stays in ranks2.run(_chosen, 8 * 2 * whole):
        assert stays == once
    for count in ranks2.run(_chosen, 8 * 2 * whole - 1):
        assert once < count < twice, "the child of the LightningModule stays, and the blocks do not"


def test_another_setting_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="`reshard_after_forward` must be True or False, not 2"):
        zp.ZeroPlusFSDPStrategy(reshard_after_forward=2)  # type: ignore[arg-type]
