"""Several models that keep step with each other: their indices, and who takes part in what."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from lightning_zeroplus.gradients.ranks.lockstep import End, Flush, Gather, Reset
from lightning_zeroplus.gradients.ranks.several import LockstepGroup


class _Engine:
    """Notes what it is asked for, as an engine of ``count`` weights.

    Attributes:
        asked: What this engine has been asked to gather, to keep, and to contribute to; whether the ranks were alike.
    """

    def __init__(self, group: LockstepGroup, count: int) -> None:
        self.asked: list[Any] = []
        self.member = group.join(
            [f"w{index}" for index in range(count)],
            gather=self.gather,
            contribute=self.contribute,
            rejoin=self.rejoin,
            is_free=self.is_free,
        )

    def gather(self, indices: Iterable[int], kept: Iterable[int]) -> None:
        self.asked.append(("gather", list(indices), list(kept)))

    def contribute(self, flush: Flush) -> bool:
        self.asked.append(("contribute", flush.members))
        return False

    def rejoin(self, alike: bool) -> None:
        self.asked.append(("rejoin", alike))

    def is_free(self) -> bool:
        return True


def _each_runs_another_model() -> list[list[Any]]:
    """Rank 0 gathers weights of the second model; rank 1 comes to a collective of its own."""
    group = LockstepGroup()
    engines = [_Engine(group, 3), _Engine(group, 2)]
    if dist.get_rank() == 0:
        assert not engines[1].member.meet(Gather((0, 1))), "it is gathered with the others"
    dist.barrier()
    asked = [engine.asked for engine in engines]
    for engine in engines:
        engine.member.leave()
    return asked


def test_a_model_that_one_rank_runs_is_gathered_by_all(ranks2: Any) -> None:
    for rank, (first, second) in enumerate(ranks2.run(_each_runs_another_model)):
        needed = [0, 1] if rank == 0 else []
        assert second[0] == ("gather", [0, 1], needed)
        assert first == [("rejoin", False)] and second[1:] == [("rejoin", False)]


def _two_models_at_once() -> list[list[Any]]:
    group = LockstepGroup()
    engines = [_Engine(group, 3), _Engine(group, 2)]
    assert not engines[dist.get_rank()].member.meet(Gather((1,)))
    engines[0].member.sync(0)
    asked = [engine.asked for engine in engines]
    for engine in engines:
        engine.member.leave()
    return asked


def test_weights_of_two_models_do_not_mix(ranks2: Any) -> None:
    """Both ranks gather a weight with the index 1, of different models."""
    for rank, asked in enumerate(ranks2.run(_two_models_at_once)):
        for number, each in enumerate(asked):
            assert each[0] == ("gather", [1], [1] if number == rank else [])


def _an_end_of_another_model() -> list[bool]:
    """The same events on all ranks; then ends of different models."""
    group = LockstepGroup()
    engines = [_Engine(group, 3), _Engine(group, 2)]
    alike = []
    for number in (1, dist.get_rank()):
        member = engines[number].member
        member.note(Reset(5))
        alike.append(member.begin_end(End(Flush(7, None, ((0, torch.float32),)))) and member.end())
    if not alike[-1]:
        group.end()
    for engine in engines:
        engine.member.leave()
    return alike


def test_ends_of_different_models_are_not_alike(ranks2: Any) -> None:
    assert ranks2.run(_an_end_of_another_model) == [[True, False]] * 2


def _expected_of_another_rank() -> list[Any]:
    """After regular backwards of the second model, one rank does not come to its reduction."""
    group = LockstepGroup()
    first, second = _Engine(group, 3), _Engine(group, 2)
    flush = Flush(7, None, ((1, torch.float32),))
    for turn in range(8):
        if turn < 7 or dist.get_rank() == 0:
            second.member.meet(flush)
        second.member.begin_end(End(Flush(9, None, ())))
        second.member.end()
    contributed = [each for each in second.asked if each[0] == "contribute"]
    assert not [each for each in first.asked if each[0] == "contribute"]
    for engine in (first, second):
        engine.member.leave()
    return contributed


def test_a_model_contributes_to_its_own_reduction(ranks2: Any) -> None:
    zeros = ("contribute", ((1, torch.float32),))
    assert ranks2.run(_expected_of_another_rank) == [[], [zeros]]


def _dead_engines() -> int:
    group = LockstepGroup()
    engine = _Engine(group, 3)
    member = engine.member
    del engine
    dist.barrier()  # the ranks meet; nobody is there to gather
    member.leave()
    return len(group._members)


def test_a_group_keeps_no_engine_alive(ranks2: Any) -> None:
    assert ranks2.run(_dead_engines) == [0, 0]
