"""What FSDP2 does for each parameter or call, and what is not needed, is left out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_zeroplus.fsdp.late_grads import groups
from lightning_zeroplus.gradients.patches import labels
from tests.fsdp.training import Task, fit, ours

LABEL = "FSDP::post_backward_reshard"


class _Watched(Task):
    def on_train_end(self) -> None:
        units = [unit for unit in self.modules() if hasattr(unit, "unshard")]
        params = [param for unit in units for group in groups(unit) for param in group.fsdp_params]
        self.casts = {param.reduce_dtype for param in params}
        self.sums = {param._unsharded_param.grad_dtype for param in params}


def _labels(profiles: bool) -> tuple[int, int]:
    """How many labels were made, and how many the profile has."""
    with patch.object(labels, "record_function", wraps=record_function) as made:
        found: Any = profile(activities=[ProfilerActivity.CPU]) if profiles else nullcontext()
        with found:
            fit(ours(), _Watched(), max_steps=2)
    assert _fsdp_param_group.record_function is record_function, "it is given back"  # type: ignore[attr-defined]
    shown = [event for event in found.events() if LABEL in event.name] if profiles else []
    return made.call_count, len(shown)


def test_labels_are_made_for_a_profiler_only(ranks2: Any) -> None:
    for (none, _), (made, shown) in zip(ranks2.run(_labels, False), ranks2.run(_labels, True), strict=True):
        assert none == 0 and made > shown > 0


def _casts(precision: Any) -> tuple[set[Any], set[Any]]:
    task = _Watched()
    fit(ours(), task, max_steps=1, precision=precision)
    return task.casts, task.sums


def test_no_dtype_is_asked_for_where_there_is_nothing_to_cast(ranks2: Any) -> None:
    assert ranks2.run(_casts, "32-true")[0] == ({None}, {torch.float32})
    assert ranks2.run(_casts, "bf16-mixed")[0] == ({torch.float32}, {torch.float32})
