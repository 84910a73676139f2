"""Batches whose shapes differ between the ranks: they compile at different times, and wait for each other nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zeroplus.engine.compile import session
from lightning_zeroplus.engine.compile.calls import fingerprint
from tests.support.training import Classifier, fit, weights, zero_plus


class _Net(nn.Module):
    """One graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


class _Ragged(Classifier):
    """Rank 1 gets fewer samples from its second batch on, in three sizes."""

    skipped: Any = None

    def build(self) -> None:
        torch.manual_seed(0)
        self.net = _Net()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        samples = 16 - 3 * (batch_idx % 4) * self.global_rank
        return self.loss((batch[0][:samples], batch[1][:samples]))

    def on_train_end(self) -> None:
        compilation = getattr(self.trainer.strategy.model, "compilation", None)
        self.skipped = None if compilation is None else compilation.skipped_frames


def _train(stage: int | None) -> tuple[Tensor, int, Any]:
    """The weights, how many graphs were compiled, and what ran in Python."""
    compiled = 0
    profiling = session.cpu_profiling

    def counted() -> Any:
        nonlocal compiled
        compiled += 1
        return profiling()

    session.cpu_profiling = counted
    try:
        strategy: Any = "ddp" if stage is None else zero_plus(stage, compile={"backend": "eager"})
        module = _Ragged(scheduler=None)
        fit(strategy, module, max_epochs=1)
        return weights(module), compiled, module.skipped
    finally:
        session.cpu_profiling = profiling


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_compile_at_different_times(ranks2: Any, stage: int) -> None:
    ours, ddp = ranks2.run(_train, stage), ranks2.run(_train, None)
    for (compiled, *_), (expected, *_) in zip(ours, ddp, strict=True):
        torch.testing.assert_close(compiled, expected, rtol=0, atol=1e-6)
    assert 0 < ours[0][1] < ours[1][1]


@pytest.mark.slow
def test_at_stage_3_calls_that_differ_run_in_python(ranks2: Any) -> None:
    """The ranks compile together, so a rank that compiled alone would wait for the others until the time limit."""
    ours, ddp = ranks2.run(_train, 3), ranks2.run(_train, None)
    assert ours[0][1] == ours[1][1] > 0
    for (weights_, _, skipped), (expected, *_) in zip(ours, ddp, strict=True):
        torch.testing.assert_close(weights_, expected, rtol=0, atol=1e-6)
        assert skipped.modules.keys() == {"net.first", "net.last"}
        assert "the ranks called 'net' with arguments of different shapes" in skipped.reasons[0]


@dataclass
class _Batch:
    x: Tensor
    size: int = 2


_OTHERS = {
    "shape": (torch.zeros(3, 2),),
    "dtype": (torch.zeros(2, 3, dtype=torch.float64),),
    "strides": (torch.zeros(3, 2).T,),
    "requires grad": (torch.zeros(2, 3, requires_grad=True),),
    "number": (torch.zeros(2, 3), 1),
    "another number": (torch.zeros(2, 3), 2),
    "text": (torch.zeros(2, 3), "1"),
    "list": ([torch.zeros(2, 3)],),
    "another list": ([torch.zeros(2, 4)],),
    "mapping": ({"x": torch.zeros(2, 3)},),
    "another mapping": ({"x": torch.zeros(2, 4)},),
    "another key": ({"y": torch.zeros(2, 3)},),
    "user's mapping": (UserDict(x=torch.zeros(2, 3)),),
    "another user's mapping": (UserDict(x=torch.zeros(2, 4)),),
    "dataclass": (_Batch(torch.zeros(2, 3)),),
    "another dataclass": (_Batch(torch.zeros(2, 4)),),
}


def test_a_fingerprint_tells_calls_apart() -> None:
    plain = (torch.zeros(2, 3),)
    prints = {name: fingerprint(True, args, {}) for name, args in _OTHERS.items()}
    prints |= {"as": fingerprint(True, plain, {}), "eval": fingerprint(False, plain, {})}
    prints["keyword"] = fingerprint(True, (), {"x": plain[0]})
    with torch.no_grad():
        prints["no grad"] = fingerprint(True, plain, {})
    assert len(set(prints.values())) == len(_OTHERS) + 4
    assert all(0 <= value < 2**62 for value in prints.values())
    assert fingerprint(True, (torch.ones(2, 3),), {}) == prints["as"], "the elements do not count"
    assert fingerprint(True, (object(),), {}) == fingerprint(True, (object(),), {})


@pytest.mark.slow
def test_a_fingerprint_does_not_depend_on_the_process() -> None:
    """Ranks that torchrun starts hash strings differently; those of a pool do not."""
    program = "from tests.engine.compile.test_shapes import prints; print(*prints())"
    here = " ".join(map(str, prints()))
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == here


def prints() -> list[int]:
    return [fingerprint(True, args, {}) for args in _OTHERS.values()]
