"""``python -m tests.gpu.streams stock|ours``: scenarios on a GPU, where their races always show; as JSON.

One rank and one GPU are enough, because the scenarios make the nodes that accumulate gradients on the layers' own
streams. Whoever must be late for the race is made to wait a tenth of a second, in the last step: long enough for all
other work of that step to be over.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager
from typing import Any

import deepspeed
import torch
from torch import Tensor

from tests.testing.streams.scenarios import MODELS, WIDTH, EngineFactory, Scenario, config, ours, stock

SLEEP_CYCLES = 200_000_000
RUNS = 5
STEPS = 3
LONG_STEPS = 200

_TOWERS = Scenario("towers", own_streams=True, zero={"stage": 2, "overlap_comm": True})
#: What races on DeepSpeed 0.19.2 (the first) and on 0.19.8 (the others).
RACES = {
    "copied while it is reduced": _TOWERS._replace(slow=(14,)),
    "refilled while it is reduced": _TOWERS._replace(slow_reduction=True),
    "oversized": _TOWERS._replace(oversized=(14,), slow=(14,)),
}


class Cuda:
    """Real streams, as many as the scenario asks for or the default one alone.

    Args:
        several: Whether they are several.
    """

    def __init__(self, several: bool) -> None:
        self.several = several
        self.sleeping = False

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def stream(self, name: str) -> torch.cuda.Stream:
        return torch.cuda.Stream() if self.several else torch.cuda.current_stream()

    def late(self, x: Tensor) -> Tensor:
        return _Late.apply(x) if self.sleeping else x


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.cuda._sleep(SLEEP_CYCLES)
        return grad


def weights(factory: EngineFactory, scenario: Scenario, *, several: bool, seed: int, steps: int = STEPS) -> Tensor:
    """The weights after some steps: shape ``(elements,)``, on the host."""
    torch.manual_seed(seed)
    place = Cuda(several)
    with torch.device("cuda"):
        model = MODELS[scenario.model](place, scenario)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = factory(model, optimizer, config(scenario))
        for step in range(steps):
            place.sleeping = several and step == steps - 1  # the steps before warm the allocator up
            loss = engine(torch.randn(4, WIDTH))
            if place.sleeping and scenario.slow_reduction:
                with torch.cuda.stream(engine.optimizer.reduction_stream):
                    torch.cuda._sleep(SLEEP_CYCLES)
            engine.backward(loss)
            engine.step()
            engine.optimizer.zero_grad()
    torch.cuda.synchronize()
    found = torch.cat([param.detach().flatten().cpu() for param in model.parameters()])
    engine.destroy()
    return found


def wrong(factory: EngineFactory, scenario: Scenario, seed: int, steps: int = STEPS) -> bool:
    """Whether several streams give other weights than one."""
    found = weights(factory, scenario, several=True, seed=seed, steps=steps)
    return not torch.equal(found, weights(factory, scenario, several=False, seed=seed, steps=steps))


def main() -> None:
    os.environ.setdefault("LOCAL_RANK", "0")
    factory = {"stock": stock, "ours": ours}[sys.argv[1]]
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("nccl", verbose=False)
    result = {name: [wrong(factory, scenario, seed) for seed in range(RUNS)] for name, scenario in RACES.items()}
    if factory is ours:
        result[f"{LONG_STEPS} steps"] = [wrong(ours, _TOWERS._replace(streams=4), 0, LONG_STEPS)]
    print(json.dumps({"version": deepspeed.__version__, "wrong": result}))


if __name__ == "__main__":
    main()
