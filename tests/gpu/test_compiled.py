"""Compiled fits on real GPUs, with inductor's kernels: DDP's weights, those of the CPU.

DeepCompile's own extension runs here, which on the CPU is replaced in Python.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_zeroplus as zp
from lightning_zeroplus.testing import RankPool
from tests.engine.compile.test_trainer import Manual, Module
from tests.support.training import loader, relative_error, trainer, weights, zero_plus

_BACKENDS = ("eager", "inductor")


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.gelu(self.norm(self.first(x))))


class _Whole(Module):
    """One graph, where the others have a frame that Dynamo skips."""

    def build(self) -> None:
        torch.manual_seed(0)
        self.net = _Network()
        self.temperature = nn.Parameter(torch.ones(4))


def _fit(strategy: Any, cls: type[Module], alone: str | None = None, **options: Any) -> tuple[Tensor, float]:
    """The weights on the CPU, and the accuracy of a validation between the epochs.

    Args:
        strategy: The Trainer's.
        cls: The module's class.
        alone: Compile the network with this backend of ``torch.compile``.
        **options: The Trainer's.
    """
    module = cls()
    if alone is not None:
        module.net.compile(backend=alone)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    run = trainer(strategy, **options)
    run.fit(module, loader(), loader(64))
    assert alone is None or torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs
    return weights(module).cpu(), float(run.callback_metrics["val_acc"])


def _on_the_cpu(cls: type[Module]) -> tuple[Tensor, float]:
    return _fit("ddp", cls)


def _deepcompile(stage: int, cls: type[Module], backend: str, threshold: int, precision: Any) -> tuple[Tensor, float]:
    config = {"zero_optimization": {"stage3_param_persistence_threshold": threshold, "reduce_bucket_size": 100}}
    return _fit(zero_plus(stage, config, compile={"backend": backend}), cls, precision=precision)


def _torch_compile(strategy: int | str, backend: str) -> tuple[Tensor, float]:
    return _fit(zp.ZeroPlusFSDPStrategy() if strategy == "fsdp" else zero_plus(int(strategy)), _Whole, backend)


def _check(found: list[tuple[Tensor, float]], expected: list[tuple[Tensor, float]]) -> None:
    for (got, accuracy), (want, wanted) in zip(found, expected, strict=True):
        assert relative_error(got, want) <= 1e-5
        assert accuracy == pytest.approx(wanted, abs=0.02)


@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize("cls", [_Whole, Module, Manual])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepcompile(gpu_ranks: RankPool, ranks2: RankPool, stage: int, cls: type[Module], backend: str) -> None:
    _check(gpu_ranks.run(_deepcompile, stage, cls, backend, 0, "32-true"), ranks2.run(_on_the_cpu, cls))


@pytest.mark.parametrize("cls", [_Whole, Module, Manual])
def test_parameters_that_stay_gathered(gpu_ranks: RankPool, ranks2: RankPool, cls: type[Module]) -> None:
    _check(gpu_ranks.run(_deepcompile, 3, cls, "inductor", 10**6, "32-true"), ranks2.run(_on_the_cpu, cls))


@pytest.mark.parametrize("stage", [2, 3])
def test_deepcompile_in_bf16(gpu_ranks: RankPool, ranks2: RankPool, stage: int) -> None:
    found = gpu_ranks.run(_deepcompile, stage, _Whole, "inductor", 0, "bf16-true")
    for (got, _), (want, _) in zip(found, ranks2.run(_on_the_cpu, _Whole), strict=True):
        assert relative_error(got, want) <= 3e-2


@pytest.mark.parametrize("strategy", [0, 1, 2, 3, "fsdp"])
def test_torch_compile_of_the_network(gpu_ranks: RankPool, ranks2: RankPool, strategy: int | str) -> None:
    _check(gpu_ranks.run(_torch_compile, strategy, "inductor"), ranks2.run(_on_the_cpu, _Whole))
