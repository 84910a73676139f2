"""Collectives that the user's code calls at stage 3 and under FSDP2: the ranks meet before each of them.

One rank may run a module that the others do not, as for a picture of samples. It gathers weights, and the others take
part when they meet it: in a backward, before a step, between batches. If they come to a collective of their own first,
they would wait in it while the other rank waits for them. So all ranks meet before it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_zeroplus.gradients.patches.replacement import Replacement
from lightning_zeroplus.gradients.tasks import current_task

# Relies on each collective asking this first, with its process group.
_rank_not_in_group: Any = distributed_c10d._rank_not_in_group
#: What all ranks of a group call; sending from one rank to another is not among them.
_COLLECTIVES = frozenset(
    """all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single all_reduce
    all_reduce_coalesced all_to_all all_to_all_single barrier broadcast broadcast_object_list gather gather_object
    monitored_barrier reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter
    scatter_object_list""".split()
)
#: From torch 2.13 on these only call another one.
_ALIASES = ("all_gather_into_tensor", "reduce_scatter_tensor")
#: Modules between a collective and the code that wants it.
_BETWEEN = frozenset(
    """contextlib typing_extensions warnings torch.autograd.function torch.distributed.c10d_logger
    torch.distributed.nn.functional lightning_zeroplus.fsdp.whole.functions""".split()
)
#: Packages whose collectives belong to a forward, a backward, a step or a checkpoint, to which all ranks come in step.
_IN_STEP = ("torch", "deepspeed", "lightning_zeroplus")
#: But a loss is called where the user's loop calls it.
_LOSSES = "lightning_zeroplus.", ".losses."


class _Meeting(NamedTuple):
    meet: Callable[[], Any]
    world: Any
    thread: int


class _InStep(threading.local):
    depth = 0


_in_step = _InStep()
#: The last one counts: a fit within a fit, such as a tuner's, has its own.
_meetings: list[_Meeting] = []


def _meet_first(group: Any) -> bool:
    # Most callers are `get_rank()` and the like, thousands in a step of many modules.
    if _meetings and sys._getframe(1).f_code.co_name in _COLLECTIVES and not _in_step.depth and current_task() == -1:
        meet, world, thread = _meetings[-1]
        is_here = world is dist.group.WORLD and thread == threading.get_ident()
        if is_here and _is_of_all(group, world) and _is_users(sys._getframe(1)):
            meet()
    return _rank_not_in_group(group)


def _is_of_all(group: Any, world: Any) -> bool:
    return group is None or (isinstance(group, dist.ProcessGroup) and group.size() == world.size())


def _is_users(collective: Any) -> bool:
    """Whether this frame of ``distributed_c10d`` is a collective of the user's, of Lightning's or of torchmetrics'."""
    frame = collective.f_back
    while frame is not None and (frame.f_globals.get("__name__") in _BETWEEN or frame.f_code.co_name in _ALIASES):
        frame = frame.f_back
    # One within another, as in `all_gather_object`, is torch's.
    name = "" if frame is None else str(frame.f_globals.get("__name__"))
    return frame is not None and (name.partition(".")[0] not in _IN_STEP or all(part in name for part in _LOSSES))


_replacement = Replacement(distributed_c10d, "_rank_not_in_group", _meet_first)


@contextmanager
def in_step() -> Iterator[None]:
    """Do what all ranks do together now: a collective within is part of it, even if a user's code calls it.

    FSDP2 lets users bring their own all-gather and reduce-scatter (``set_custom_all_gather``).
    """
    _in_step.depth += 1
    try:
        yield
    finally:
        _in_step.depth -= 1


@contextmanager
def meeting_before_collectives(meet: Callable[[], Any]) -> Iterator[None]:
    """Within, in the whole process: the ranks meet before a collective of all ranks, unless a backward runs.

    Args:
        meet: All ranks call it; where one still runs modules by itself, the others take part in its gathers.
    """
    meeting = _Meeting(meet, dist.group.WORLD, threading.get_ident())
    with _replacement():
        _meetings.append(meeting)
        try:
            yield
        finally:
            _meetings.remove(meeting)
