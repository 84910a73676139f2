"""What DeepSpeed's own compiled ZeRO-3 gets silently wrong, and that ours, on the same models, is right."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from benchmarks.stock_deepcompile import stock_engine
from tests.compile.models import Spec, batch, build
from tests.compile.test_skipped_frames import ROUNDING
from tests.compile.training import LR, config, full, train

SKIPPED = Spec(("loop", "compiled"))
#: What runs in Python: the loop's layers, and the head in the root's frame, which the loop takes along.
EAGER = ("blocks.0.", "head.")
TWICE = Spec(("compiled", "again"), root_breaks=True)


class Stock(NamedTuple):
    """
    start: Parameters before training.
    trained: Parameters after it.
    reference: Those of one process, without ZeRO or a compiler.
    forward_ends: Gathered bytes at the end of each forward.
    backward_ends: Gathered bytes at the end of each backward.
    """

    start: dict[str, Tensor]
    trained: dict[str, Tensor]
    reference: dict[str, Tensor]
    forward_ends: list[int]
    backward_ends: list[int]


def _train_stock(spec: Spec, steps: int) -> Stock:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = build(spec)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=LR)
    forward_ends, backward_ends = [], []
    with stock_engine(model, torch.optim.SGD(model.parameters(), lr=LR), config(3)) as engine:
        for step in range(steps):
            loss = engine(*batch(step, rank))
            forward_ends.append(_settled(engine.meter))
            engine.backward(loss)
            backward_ends.append(_settled(engine.meter))
            engine.step()
            optimizer.zero_grad()
            for other in range(world):
                (reference(*batch(step, other)) / world).backward()
            optimizer.step()
        trained = {name: full(param) for name, param in model.named_parameters()}
    wanted = {name: param.detach() for name, param in reference.named_parameters()}
    return Stock(start, trained, wanted, forward_ends, backward_ends)


def _settled(meter: Any) -> int:
    """Gloo's thread holds on to the buffer of the last gather for a moment after the gather is done."""
    least, deadline = meter.live(), time.monotonic() + 0.1
    while time.monotonic() < deadline:
        least = min(least, meter.live())
    return least


def _is_eager(name: str) -> bool:
    return name.startswith(EAGER)


def test_upstream_never_trains_the_parameters_of_a_skipped_frame(ranks2: Any) -> None:
    steps = 3
    for outcome in ranks2.run(_train_stock, SKIPPED, steps):
        moved = {name: not torch.equal(outcome.trained[name], outcome.start[name]) for name in outcome.start}
        assert moved == {name: not _is_eager(name) for name in outcome.start}
        eager = sum(param.nbytes for name, param in outcome.start.items() if _is_eager(name))
        assert outcome.forward_ends == [eager] * steps, "upstream keeps what it gathers until backward ends"
        assert outcome.backward_ends == [0] * steps
    for ours in ranks2.run(partial(train, steps=steps), partial(build, SKIPPED), 3):
        assert ours.error <= ROUNDING and not ours.still, ours
        assert ours.forward_end == ours.backward_end == 0, ours
