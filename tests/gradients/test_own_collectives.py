"""Which collectives the ranks meet before: of all ranks, and not called by this package, torch or DeepSpeed."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.nn.functional import all_reduce

from lightning_zeroplus.gradients.ranks.own_collectives import (
    _ALIASES,
    _COLLECTIVES,
    in_step,
    meeting_before_collectives,
)

_CALL = """
def call(dist, tensor):
    dist.all_reduce(tensor)
"""


def _as_of(module: str) -> Any:
    """A function that calls a collective, of a module with this name."""
    made = types.ModuleType(module)
    exec(_CALL, vars(made))
    return made.call  # type: ignore[attr-defined]


def _meetings() -> dict[str, int]:
    """How often the ranks meet, by what is called."""
    count: dict[str, int] = {}
    met: list[None] = []
    tensor, world = torch.ones(2), dist.get_world_size()
    several = [torch.zeros(2) for _ in range(world)]
    objects: list[Any] = [None] * world
    alone = [dist.new_group([rank], backend="gloo") for rank in range(world)][dist.get_rank()]
    every = dist.new_group(backend="gloo")

    def differentiated() -> None:
        leaf = torch.ones(2, requires_grad=True)
        all_reduce(leaf * 2).sum().backward()  # its backward reduces, too

    def from_a_thread() -> None:
        thread = threading.Thread(target=lambda: dist.all_reduce(tensor))
        thread.start()
        thread.join()

    calls: dict[str, Any] = {
        "barrier": lambda: dist.barrier(),
        "all_reduce": lambda: dist.all_reduce(tensor),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "all_gather": lambda: dist.all_gather(several, tensor),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.zeros(2 * world), tensor),
        "all_gather_object": lambda: dist.all_gather_object(objects, 1),
        "broadcast_object_list": lambda: dist.broadcast_object_list(objects, 0),
        "another group of all ranks": lambda: dist.all_reduce(tensor, group=every),
        "differentiated": differentiated,
        "a library": lambda: _as_of("torchmetrics.utilities.distributed")(dist, tensor),
        "what all do together": in_step()(lambda: dist.all_reduce(tensor)),
        "the number of ranks": lambda: dist.get_world_size(),
        "a group of one rank": lambda: dist.all_reduce(tensor, group=alone),
        "from a thread": from_a_thread,
        "torch's": lambda: _as_of("torch.nn.modules._functions")(dist, tensor),
        "DeepSpeed's": lambda: _as_of("deepspeed.comm.torch")(dist, tensor),
        "ours": lambda: _as_of("lightning_zeroplus.engine.reduction.exchange")(dist, tensor),
    }
    with meeting_before_collectives(lambda: met.append(None)):
        for name, call in calls.items():
            met.clear()
            call()
            count[name] = len(met)
    met.clear()
    dist.barrier()
    count["afterwards"] = len(met)
    return count


def test_the_ranks_meet_once_before_a_users_collective(ranks2: Any) -> None:
    once = {"barrier", "all_reduce", "broadcast", "all_gather", "all_gather_object", "broadcast_object_list"}
    once |= {"all_gather_into_tensor", "another group of all ranks", "differentiated", "a library"}
    for count in ranks2.run(_meetings):
        assert {name for name, times in count.items() if times == 1} == once
        assert all(times in (0, 1) for times in count.values())


def _newest() -> list[str]:
    met: list[str] = []
    with meeting_before_collectives(lambda: met.append("outer")):
        with meeting_before_collectives(lambda: met.append("inner")):
            dist.barrier()
        dist.barrier()
    return met


def test_a_fit_within_a_fit_has_its_own_meeting(ranks2: Any) -> None:
    assert ranks2.run(_newest) == [["inner", "outer"]] * 2


def test_torch_is_as_before() -> None:
    assert distributed_c10d._rank_not_in_group.__module__ == "torch.distributed.distributed_c10d"


@pytest.mark.parametrize("name", sorted(name for name in _COLLECTIVES if hasattr(distributed_c10d, name)))
def test_every_collective_asks_for_its_group_first(name: str) -> None:
    # Relied on: a collective that does not ask would not be met before.
    names = _names_in(name)
    if name in _ALIASES and "_rank_not_in_group" not in names:
        (other,) = _COLLECTIVES.intersection(names)
        names = _names_in(other)
    assert "_rank_not_in_group" in names


def _names_in(collective: str) -> tuple[str, ...]:
    function = getattr(distributed_c10d, collective)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__.co_names
