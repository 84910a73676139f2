"""In bf16 the master weights are those that a torch optimizer makes of fp32 weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.compile.training import config

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.5}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.5}),
}
STEPS = 3


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4).bfloat16())
        self.second = nn.Parameter(torch.linspace(1, 2, 5).bfloat16())

    def forward(self, step: int) -> Tensor:
        """A loss whose gradients bf16 holds exactly, and which do not depend on the weights."""
        return sum((param.float() * (2.0**-step * (index + 1))).sum() for index, param in enumerate(self.parameters()))


def _masters(engine: Any) -> list[Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    if engine.zero_optimization_stage():
        return [safe_get_full_fp32_param(param).detach().clone() for param in engine.module.parameters()]
    return [master.detach().clone() for master in engine.optimizer.fp32_groups[0]]


def _error(stage: int, name: str) -> float:
    import deepspeed

    from lightning_zeroplus.engine.build import build_engine

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    cls, settings = OPTIMIZERS[name]
    model = Weights()
    reference = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = cls(reference, **settings)
    options = config(stage) | {"bf16": {"enabled": True}}
    engine = build_engine(model, cls(model.parameters(), **settings), options)
    for step in range(STEPS):
        engine.backward(engine(step))
        engine.step()
        engine.optimizer.zero_grad()
        for index, param in enumerate(reference):
            param.grad = torch.full_like(param, 2.0**-step * (index + 1))
        optimizer.step()
    found = _masters(engine)
    engine.destroy()
    return max(float((a.view_as(b) - b).abs().max()) for a, b in zip(found, reference, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_they_are_those_of_the_torch_optimizer(ranks2: Any, stage: int, optimizer: str) -> None:
    """At stage 0 upstream steps once with zero gradients when it is built, which decays them and counts as a step."""
    assert max(ranks2.run(_error, stage, optimizer)) <= 1e-6


def _read_after_a_step(stage: int) -> list[tuple[Tensor, Tensor]]:
    import deepspeed

    from lightning_zeroplus.engine.build import build_engine

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    model = Weights().float()
    engine = build_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), config(stage))
    before = [param.detach().clone() for param in model.parameters()]
    engine.backward(engine(0))
    engine.step()
    read, now = _masters(engine), [param.detach().clone() for param in model.parameters()]
    engine.destroy()
    assert not any(map(torch.equal, before, now))
    return list(zip(read, now, strict=True))


@pytest.mark.parametrize("stage", [1, 2])
def test_in_fp32_deepspeed_reads_the_module_s_weights(ranks2: Any, stage: int) -> None:
    """They are the master weights; what upstream made of them first is not kept, nor read."""
    for pairs in ranks2.run(_read_after_a_step, stage):
        assert all(torch.equal(read.view_as(weight), weight) for read, weight in pairs)
