"""What the engine overrides or reads inside DeepSpeed is there; and a release that has renamed it is refused.

A release is made by renaming: the source of the class, with one name changed, is compiled and put in its place.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from lightning_zeroplus.doctor.checks import probes
from lightning_zeroplus.engine.build import build_engine
from lightning_zeroplus.engine.upstream import probe
from lightning_zeroplus.engine.upstream.probe import OPTIONAL, REQUIRED, Probe, UnsupportedDeepSpeedError


@pytest.mark.parametrize("each", (*REQUIRED, *OPTIONAL), ids=lambda each: each.feature)
def test_the_installed_release_has_it(each: Probe) -> None:
    assert each.missing() == []


def _names(each: Probe) -> list[str]:
    used = [name for _, name in (*each.calls, *each.loops)]
    return [*each.methods.split(), *each.attributes.split(), *used]


def _rename(names: list[str], owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a copy of a class or module of DeepSpeed, and of its bases, in its place, with other names for ``names``."""
    path, _, last = owner.rpartition(".")
    original = getattr(importlib.import_module(path), last)
    written = [name.removeprefix(f"_{last}") for name in names]  # private names, as a class writes its own

    def renamed(source: str) -> str:
        return re.sub(rf"\b({'|'.join(written)})\b", r"renamed_\1", source)

    if inspect.ismodule(original):
        copy: Any = types.ModuleType(original.__name__)
        vars(copy).update(vars(original))
        exec(compile(renamed(inspect.getsource(original)), owner, "exec"), vars(copy))
    else:
        space = dict(vars(sys.modules[original.__module__]))
        for cls in reversed([cls for cls in original.__mro__ if cls.__module__.startswith("deepspeed.")]):
            space.update({k: v for k, v in vars(sys.modules[cls.__module__]).items() if k not in space})
            exec(compile(renamed(inspect.getsource(cls)), owner, "exec"), space)
        copy = space[last]
        copy.__module__ = original.__module__
    monkeypatch.setattr(importlib.import_module(path), last, copy)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    _forget()
    yield
    _forget()


def _forget() -> None:
    probe.has.cache_clear()
    probe.check.cache_clear()


def _check_noticed(each: Probe, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _rename(names, each.owner, monkeypatch)
    lost = " ".join(each.missing())
    assert [name for name in names if not re.search(rf"[.> ]{name}\b", lost)] == []
    if each.without is not None:
        assert not probe.has(each.feature)
        probe.check(each.stages[0])
        return
    with pytest.raises(UnsupportedDeepSpeedError) as refused:
        probe.check(each.stages[0])
    for part in (deepspeed.__version__, names[0], each.feature):
        assert part in str(refused.value)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("each", (*REQUIRED, *OPTIONAL), ids=lambda each: each.feature)
def test_renamed_ones_are_noticed(each: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_noticed(each, _names(each), monkeypatch)


@pytest.mark.thorough
@pytest.mark.sampled(every=4, otherwise="every_cell")
@pytest.mark.parametrize(
    ("each", "name"),
    [pytest.param(each, name, id=f"{each.feature}-{name}") for each in (*REQUIRED, *OPTIONAL) for name in _names(each)],
)
def test_one_renamed_is_noticed(each: Probe, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_noticed(each, [name], monkeypatch)


def test_nothing_is_touched_before(monkeypatch: pytest.MonkeyPatch) -> None:
    _rename(["process_gradients"], "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer", monkeypatch)
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(UnsupportedDeepSpeedError, match=r"DeepSpeedZeroOptimizer\.process_gradients, .*which 'accumu"):
        build_engine(net, optimizer, {"zero_optimization": {"stage": 2}})
    assert not torch.distributed.is_initialized()
    assert not any(param._post_accumulate_grad_hooks or hasattr(param, "ds_id") for param in net.parameters())
    for stage in (0, 3):
        probe.check(stage)  # the others work


def test_a_release_is_looked_at_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    probe.check(2)
    monkeypatch.setattr(Probe, "missing", lambda self: pytest.fail(f"{self.feature} is looked for again"))
    probe.check(2)


def test_doctor_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {finding.status for finding in probes()} == {"ok", "native"}
    _rename(["partition_grads"], "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3", monkeypatch)
    (problem,) = [finding for finding in probes() if finding.status == "problem"]
    assert problem.name == "accumulation at ZeRO 3" and "partition_grads" in problem.detail
    _rename(["set_gradient_accumulation_boundary"], "deepspeed.runtime.base_optimizer.ZeROOptimizer", monkeypatch)
    (patched,) = [finding for finding in probes() if finding.status == "patched"]
    assert "an attribute is set instead" in patched.detail


def test_no_optimizer_scales_the_loss_at_stage_0() -> None:
    """If upstream begins to scale for the stage-0 fp16 optimizer, ``ZeroPlusEngine.backward`` must stop."""
    assert not issubclass(FP16_UnfusedOptimizer, ZeROOptimizer)
