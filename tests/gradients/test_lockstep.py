"""That ranks which run different modules do the same collectives; in threads, on collectives that are written here."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lightning_zeroplus.gradients.ranks.lockstep import Copy, End, Flush, Gather, Lockstep, Reset, Write

# An event of a rank: what it gathers, or "copy", "write", "flush", "reset", "end".
Step = list[Any]
_REGULAR: Step = ["reset", 0, 1, 2, 3, 3, 2, "flush", 1, 0, "end"]


class _Ranks:
    """Collectives of threads; one that not all ranks come to ends in an error."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._there: dict[tuple[str, int], dict[int, Any]] = defaultdict(dict)
        self._changed = threading.Condition()

    def post(self, kind: str, number: int, rank: int, value: Any) -> None:
        with self._changed:
            self._there[kind, number][rank] = value
            self._changed.notify_all()

    def all(self, kind: str, number: int) -> list[Any]:
        """What all ranks have posted, in order."""
        with self._changed:
            there = self._there[kind, number]
            assert self._changed.wait_for(lambda: len(there) == self.count, timeout=30), f"{kind} {number}: {there}"
            return [there[rank] for rank in range(self.count)]


class _Round:
    def __init__(self, wait: Callable[[], list[list[int]]]) -> None:
        self.result = wait


class _Rank:
    """Runs steps as an engine does: gathers, reductions of full buckets, and one at the end.

    Attributes:
        rounds: After each step, how many rounds of announcements it took.
        alike: After each step, whether the ranks had done the same.
        contributed: To how many reductions it has contributed zeros only.
    """

    def __init__(self, ranks: _Ranks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self._numbers = dict.fromkeys(("round", "data"), 0)
        self.lockstep = Lockstep(self._announce, [f"p{i}" for i in range(200)], self._together, self._contribute)
        self.rounds: list[int] = []
        self.alike: list[bool] = []
        self.contributed = 0
        self.there: set[int] = set()  # what is gathered
        self.written = 0

    def _next(self, kind: str) -> int:
        self._numbers[kind] += 1
        return self._numbers[kind]

    def _announce(self, values: Sequence[int]) -> _Round:
        number = self._next("round")
        self._ranks.post("round", number, self._rank, list(values))
        return _Round(lambda: self._ranks.all("round", number))

    def _data(self, what: Any) -> None:
        """A collective of gradients or weights, which all ranks must do with the same ones."""
        number = self._next("data")
        self._ranks.post("data", number, self._rank, what)
        assert len(set(self._ranks.all("data", number))) == 1

    def _together(self, indices: Iterable[int], kept: Iterable[int]) -> None:
        self._data(("gather", *indices, "after", self.written))
        self.there |= set(kept)

    def _contribute(self, flush: Flush) -> bool:
        self.contributed += 1
        if flush.members:
            self._data(("flush", flush.fingerprint))
        had, self._bucket, self._parted = bool(self._bucket), [], self._parted or bool(self._bucket)
        return had

    def run(self, steps: list[Step]) -> _Rank:
        for step in steps:
            before = self.lockstep.count
            self._bucket: list[int] = []
            self._parted = False
            self._seen = 0
            for event in step:
                self._do(event)
            self.rounds.append(self.lockstep.count - before)
        return self

    def _do(self, event: Any) -> None:
        if event == "reset":
            self.lockstep.note(Reset(0))
        elif event == "copy":
            if self.lockstep.meet(Copy(9)):
                self._data("a read of the copy")  # of which every rank has its part
            elif self.lockstep.meet(Gather((9,))):
                self._data(("gather", 9))
        elif event == "write":
            if self.lockstep.diverged:
                self.lockstep.meet(Write())
            self.written += 1
        elif event == "flush":
            flush = self._flush()
            if not self._parted and self.lockstep.meet(flush) and not self._parted:
                self._data(("flush", flush.fingerprint))
            else:
                self._parted = True
            self._bucket = []
        elif event == "end":
            flush = self._flush()
            if self.lockstep.begin_end(End(flush)):
                self._data(("flush", flush.fingerprint))
            self._bucket = []
            self.alike.append(self.lockstep.end())
        else:
            self.there.discard(event)
            if self.lockstep.meet(Gather((event,))):
                self._data(("gather", event, "after", self.written))
                self.there.add(event)
            assert event in self.there
            self._bucket.append(event)
            self._seen = hash((self._seen, event)) >> 1

    def _flush(self) -> Flush:
        return Flush(self._seen, None, ((0, None),))  # type: ignore[arg-type]


def _run(programs: list[list[Step]]) -> list[_Rank]:
    ranks = _Ranks(len(programs))
    with ThreadPoolExecutor(len(programs)) as pool:
        running = [pool.submit(_Rank(ranks, rank).run, steps) for rank, steps in enumerate(programs)]
        return [each.result() for each in running]


def test_a_regular_loop_announces_its_ends_only() -> None:
    first, second = _run([[_REGULAR] * 12] * 2)
    assert first.rounds == second.rounds
    assert first.rounds[0] == len(_REGULAR) - 1  # all but the reset
    assert first.rounds[-4:] == [1] * 4
    assert all(first.alike)


def test_a_copy_is_announced_and_leaves_the_loop_regular() -> None:
    for rank in _run([[["reset", "copy", *_REGULAR[1:]]] * 12] * 2):
        assert rank.rounds[-4:] == [2] * 4
        assert all(rank.alike)


@pytest.mark.parametrize("place", [1, 4, 7, 10])
def test_a_rank_makes_alone_the_copy_that_all_have_made(place: int) -> None:
    copies = [*_REGULAR[:place], "copy", *_REGULAR[place:]]
    for rank in _run([[copies] * 20, [*[copies] * 8, *[_REGULAR] * 4, *[copies] * 8]]):
        assert rank.alike == [not 8 <= step < 12 for step in range(20)]
        assert rank.rounds[-1] == 2, "the loop is regular again"


@pytest.mark.parametrize("alone", [[5], [5, 6], [1, 5]], ids=str)
def test_a_write_waits_for_what_another_rank_reads_first(alone: Step) -> None:
    """Otherwise that rank gets what is written in part: a gather notes how many writes each rank has made."""
    writes: Step = [0, "write", 1, "write", 2, 3, "write"]
    for rank in _run([[[*alone, *writes, "end"]], [[*writes, "end"]], [[*writes, "end"]]]):
        assert rank.alike == [False] and rank.written == 3


def test_writes_of_a_regular_loop_are_not_announced() -> None:
    steps = ["reset", 0, "write", 1, "write", "end"]
    for rank in _run([[steps] * 12] * 2):
        assert rank.rounds[-4:] == [1] * 4 and all(rank.alike)


def test_two_kinds_of_steps_by_turns_become_regular() -> None:
    for rank in _run([[_REGULAR, ["reset", 5, 5, "end"]] * 12] * 2):
        assert rank.rounds[-4:] == [1] * 4


@pytest.mark.parametrize(
    "other",
    [
        ["reset", 0, 1, 3, 3, "flush", 1, 0, "end"],  # without a module
        ["reset", 0, 1, 2, 3, 4, 4, 3, 2, "flush", 1, 0, "end"],  # with another
        ["reset", 3, 2, 1, 0, 0, 1, "flush", 2, 3, "end"],  # in another order
        ["reset", 0, 1, 2, 3, 3, "end"],  # a shorter backward
        ["reset", 0, 1, 2, 3, *_REGULAR],  # a forward before
        [0, 1, 2, *_REGULAR],  # part of one
        ["reset", *_REGULAR],  # one that gathers nothing
        ["end"],  # nothing at all
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [0, 3, 9])
def test_one_rank_does_something_else(other: Step, at: int) -> None:
    mine = [_REGULAR] * 20
    mine[at] = other
    for rank in _run([mine, [_REGULAR] * 20, [_REGULAR] * 20]):
        assert rank.alike == [step != at for step in range(20)]
        assert rank.rounds[-2:] == [1, 1], "the loop is regular again"


def test_all_ranks_do_something_else_together() -> None:
    steps = [*[_REGULAR] * 8, ["reset", 7, "end"], *[_REGULAR] * 8]
    for rank in _run([steps] * 2):
        assert rank.alike == [True] * 17
        assert rank.rounds[8] == 2
        assert rank.rounds[-1] == 1


def test_all_ranks_go_on_otherwise_with_gradients_in_their_buckets() -> None:
    """They had to empty them for what was expected: their gradients wait for the end, on all of them."""
    steps = [*[_REGULAR] * 8, ["reset", 0, 1, 2, 7, "end"], *[_REGULAR] * 8]
    for rank in _run([steps] * 2):
        assert rank.alike == [step != 8 for step in range(17)]
        assert rank.rounds[-1] == 1


def test_a_loop_in_which_every_sixth_step_is_another_is_not_expected_to_be_regular() -> None:
    for rank in _run([[*[_REGULAR] * 5, ["reset", 5, 5, "end"]] * 12] * 2):
        assert all(rank.alike)
        assert rank.contributed == 2, "a full bucket and the end of one step; it was expected too early once"


def _some(draw: random.Random) -> Step:
    step = list(draw.choice([_REGULAR, ["reset", 0, 5, 5, "flush", 0, "end"]])[:-1])
    for _ in range(draw.randrange(4)):
        at = draw.randrange(len(step))
        others = ["flush", "reset", "copy", *range(8), 150]
        step[at : at + draw.randrange(3)] = draw.choices(others, k=draw.randrange(3))
        step = step or [0]
    return [*step, "end"]


@pytest.mark.parametrize("seed", [*range(60), 1052, 1223])
def test_random_loops(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.choice([2, 3])
    programs: list[list[Step]] = [[] for _ in range(count)]
    while len(programs[0]) < 40:
        if draw.random() < 0.3:
            for program in programs:
                program.append(_some(draw))
        else:
            step = _some(draw) if draw.random() < 0.3 else _REGULAR
            times = draw.randrange(1, 8)
            for program in programs:
                program += [step] * times
    first, *others = _run(programs)
    for other in others:
        assert other.alike == first.alike


def test_a_rank_that_nobody_joins_names_the_weights() -> None:
    def late() -> list[list[int]]:
        raise RuntimeError("timed out")

    lockstep = Lockstep(lambda values: _Round(late), ["a.weight", "b.weight"], lambda *_: None, lambda _: False)
    with pytest.raises(RuntimeError, match="for the weights of 'b.weight', and they did not come"):
        lockstep.meet(Gather((1,)))


def test_a_single_rank_announces_nothing() -> None:
    lockstep = Lockstep(None, ["a.weight"], lambda *_: None, lambda _: False)
    lockstep.note(Reset(0))
    assert lockstep.meet(Gather((0,)))
    assert lockstep.begin_end(End(Flush(0, None, ())))
    assert lockstep.end()
    assert lockstep.count == 0
