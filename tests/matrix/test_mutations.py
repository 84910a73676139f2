"""Each line of the accumulation that corrects upstream, taken out: some cell of the matrix must see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest

from lightning_zeroplus.engine.reduction.life import Event
from tests.matrix.cells import BOUNDS, Cell, run_cell


def _replace(module: str, owner: str, name: str, value: Any) -> Any:
    import importlib

    cls = getattr(importlib.import_module(f"lightning_zeroplus.engine.{module}"), owner)
    return patch.object(cls, name, value)


@contextmanager
def _remove(module: str, owner: str, name: str) -> Iterator[None]:
    import importlib

    cls = getattr(importlib.import_module(f"lightning_zeroplus.engine.{module}"), owner)
    method = cls.__dict__[name]
    delattr(cls, name)
    try:
        yield
    finally:
        setattr(cls, name, method)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _flush_twice(self: Any) -> None:
    if self.life.is_waiting:
        for _ in range(2):
            sums = {index: grad.clone() for index, grad in self.local_sums.sums.items()}
            self.reduce(frozenset(self._members))
            self.local_sums.sums.update(sums)
        self.local_sums.sums.clear()
        self.life.goes_on(Event.REDUCED)


def _skip_what_is_left(self: Any) -> None:
    if self.life.is_waiting and not self.local_sums.hooked:
        self.reduce(frozenset(self._members))
    self.local_sums.sums.clear()
    self.life.goes_on(Event.REDUCED)


def _forget_what_waited(self: Any, index: int, param: Any) -> bool:
    if self.defers(index):
        self.add(index, param)
        return True
    self.sums.pop(index, None)
    return False


def _overwrite(self: Any, index: int, param: Any) -> None:
    if param.grad is not None:
        self.sums[index], param.grad = param.grad, None


MUTATIONS: dict[str, Callable[[], Any]] = {
    "a second flush": lambda: _replace("accumulation", "GradientAccumulation", "reduce_if_needed", _flush_twice),
    "no flush of what the last backward left": lambda: _replace(
        "accumulation", "GradientAccumulation", "reduce_if_needed", _skip_what_is_left
    ),
    "the last backward alone": lambda: _replace("reduction.local_sums", "LocalSums", "take", _forget_what_waited),
    "sums left in param.grad": lambda: _replace(
        "reduction.local_sums", "LocalSums", "sums", property(lambda self: self._sums)
    ),
    "the last backward of a window alone": lambda: _replace("reduction.local_sums", "LocalSums", "add", _overwrite),
    "a boundary in every backward": lambda: _replace(
        "engine", "ZeroPlusEngine", "is_gradient_accumulation_boundary", lambda self: True
    ),
    "zero_grad of the wrapper": lambda: _remove("families.zeroes", "RoutedZeroGrad", "zero_grad"),
    "no flush before a second gradient": lambda: _replace("accumulation", "GradientAccumulation", "flush", _nothing),
    "no flush of an interrupted backward": lambda: _replace(
        "accumulation", "GradientAccumulation", "before_step", lambda self, part=None: not self.life.is_empty
    ),
    "epilogue of an idle backward": lambda: _remove(
        "families.zero12", "_Zero12Overrides", "independent_gradient_partition_epilogue"
    ),
    "offloaded gradients added to the last step's": lambda: _remove(
        "families.zero12", "_Zero12Overrides", "async_accumulate_grad_in_cpu_via_gpu"
    ),
    "partitions overwritten": lambda: _remove("families.zero3_overrides", "Zero3Overrides", "partition_grads"),
    "stale partitions": lambda: _replace("families.zero3", "Zero3Accumulation", "_zero_stale_partition", _nothing),
    "consumed module counters": lambda: _replace("gathering.gathers", "_Always", "__sub__", int.__sub__),
    "bf16 gradients left in place": lambda: _remove("families.replicated", "BF16Accumulation", "end_backward"),
    "no clipping by value": lambda: _replace("accumulation", "GradientAccumulation", "clip_by_value", _nothing),
    "no clipping by norm": lambda: _replace(
        "accumulation", "GradientAccumulation", "clipping", lambda self: nullcontext()
    ),
    "unscaled fp16 loss at stage 0": lambda: _replace(
        "engine", "ZeroPlusEngine", "loss_scale_factor", lambda self: 1.0
    ),
    "gradients that lack the loss scale": lambda: _replace(
        "accumulation", "GradientAccumulation", "missing_scale", lambda self: 1.0
    ),
}

CASES: list[tuple[str, Cell]] = [
    *(("a second flush", Cell(stage, "several", reduction="step")) for stage in (1, 2, 3)),
    *(
        ("no flush of what the last backward left", Cell(stage, "unused", window="backwards", reduction="backward"))
        for stage in (2, 3)
    ),
    *(("the last backward alone", Cell(stage, "several", window="no_sync")) for stage in (2, 3)),
    *(("the last backward of a window alone", Cell(stage, "several", window="all")) for stage in (2, 3)),
    *(("sums left in param.grad", Cell(stage, "several", window="all")) for stage in (1, 2)),
    *(
        ("a boundary in every backward", Cell(stage, "several", offload="cpu", reduction="backward"))
        for stage in (1, 2)
    ),
    ("zero_grad of the wrapper", Cell(2, "several", zero_grad="discard")),
    ("zero_grad of the wrapper", Cell(3, "several", zero_grad="discard")),
    ("no flush before a second gradient", Cell(2, "nested", zero={"reduce_scatter": False})),
    ("no flush before a second gradient", Cell(3, "nested", zero={"reduce_bucket_size": 100_000})),
    ("no flush of an interrupted backward", Cell(2, "interrupted_last", zero={"reduce_bucket_size": 100_000})),
    ("no flush of an interrupted backward", Cell(3, "interrupted_last", zero={"reduce_bucket_size": 100_000})),
    ("epilogue of an idle backward", Cell(2, "idle", zero={"reduce_scatter": False})),
    ("offloaded gradients added to the last step's", Cell(2, "unused", offload="cpu")),
    ("partitions overwritten", Cell(3, "several")),
    ("stale partitions", Cell(3, "late_once")),
    ("consumed module counters", Cell(3, "same_loss_twice")),
    ("bf16 gradients left in place", Cell(1, "several", precision="bf16-true", grad_accum_dtype="fp32")),
    ("no clipping by value", Cell(2, "several", clip=(0.01, "value"))),
    ("no clipping by value", Cell(0, "several", clip=(0.01, "value"))),
    ("no clipping by norm", Cell(1, "several", clip=(0.05, "norm"))),
    ("no clipping by norm", Cell(3, "several", clip=(0.05, "norm"))),
    ("unscaled fp16 loss at stage 0", Cell(0, "single", precision="16-true")),
    *(("gradients that lack the loss scale", Cell(stage, "direct", precision="16-true")) for stage in (0, 2, 3)),
]


def _run_mutated(mutation: str, cell: Cell) -> str:
    """What became of the cell: ``"survived"``, or how it failed."""
    with MUTATIONS[mutation]():
        try:
            outcome = run_cell(cell)
        except Exception as error:
            return f"raised {type(error).__name__}"
    wrong = max(outcome.error, outcome.norm_error) > BOUNDS[cell.kind] or outcome.frozen
    return f"error {outcome.error:.2g}" if wrong else "survived"


@pytest.mark.parametrize(
    ("mutation", "cell"),
    CASES,
    ids=[f"{mutation.replace(' ', '_')}-stage{cell.stage}-{cell.pattern}" for mutation, cell in CASES],
)
def test_mutation_is_caught(ranks2: Any, mutation: str, cell: Cell) -> None:
    for fate in ranks2.run(_run_mutated, mutation, cell):
        assert fate != "survived"


def test_every_mutation_has_a_case() -> None:
    assert {mutation for mutation, _ in CASES} == set(MUTATIONS)


def test_sums_that_upstream_would_move_do_not_lie_in_grads(ranks2: Any) -> None:
    """Where gradients are kept in another dtype, upstream empties ``param.grad`` at the end of each backward."""
    sixteen: dict[str, Any] = {"precision": "bf16-true", "grad_accum_dtype": "fp32"}
    cell = Cell(1, "unused", offload="cpu", window="all", reduction="backward", **sixteen)
    for outcome in ranks2.run(run_cell, cell):
        assert not outcome.frozen and outcome.error <= BOUNDS[cell.kind]
