"""Stage 3 and FSDP2 where ranks run different modules: every rank takes part in the others' gathers.

The weights of a module are gathered from all ranks when it runs, forward or backward. Where ranks run different
modules, their gathers would mix weights, or wait for each other for ever. So no rank begins a gather, or reduces a
bucket, that the others do not begin as well:

- A sequence of gathers and reductions that has come repeatedly is expected of all ranks, and needs no message. A rank
  that is about to do something else first does what the others expect of it until their backward ends, with gradients
  of zero.
- Otherwise the ranks announce what they are about to do, and all of them gather what any of them needs. A rank at the
  end of its backward waits there, and gathers with the others, until all have come to theirs.

Then the gradients that the ranks have not reduced together are reduced, and a missing one counts as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

from lightning_zeroplus.gradients.ranks.agreement import Fingerprint
from lightning_zeroplus.gradients.ranks.foresight import Foresight
from lightning_zeroplus.gradients.ranks.own_collectives import in_step

# Of an integer that is announced.
_BITS = 62


class Flush(NamedTuple):
    """One reduction of what is in buckets.

    Attributes:
        fingerprint: Of all that the backward has put into buckets so far, and why they are reduced.
        dtype: That of the bucket; None: all buckets.
        members: The parameters in it, in the order in which they came, and the dtypes of their gradients.
        among_shards: Under FSDP2 with replicas: the gradients are not reduced among the replicas yet.
    """

    fingerprint: int
    dtype: torch.dtype | None
    members: tuple[tuple[int, torch.dtype], ...]
    among_shards: bool = False


class Gather(NamedTuple):
    """Weights are gathered.

    Attributes:
        indices: Of the parameters; under FSDP2 of the units, and after these of single weights.
    """

    indices: tuple[int, ...]


class Copy(NamedTuple):
    """A sharded weight is copied. If all ranks do, nothing is gathered: each copies its part. It is always announced.

    Attributes:
        weight: Its index, as in :class:`Gather`.
    """

    weight: int


class Write(NamedTuple):
    """The shards of a weight are written, by code of users.

    A rank that knows that the ranks differ waits with it until all come to a write: it gathers for the others what they
    still read before.
    """


class Reset(NamedTuple):
    """A forward of the root begins, for which upstream compares the recorded order of modules.

    Attributes:
        fingerprint: Of the order; 0: there is nothing to compare.
    """

    fingerprint: int


class End(NamedTuple):
    """A backward ends, or a forward that none follows.

    Attributes:
        flush: What is reduced at its end.
        is_all: There is nothing else that the ranks do there; else it cannot be expected.
    """

    flush: Flush
    is_all: bool = True


Event: TypeAlias = Gather | Copy | Write | Reset | Flush | End
_KINDS: tuple[type, ...] = (Gather, Copy, Write, Reset, Flush, End)
#: How far a rank is from what was expected.
_ON_TRACK, _ASTRAY, _TOOK_BACK = range(3)


class Announced(Protocol):
    """What all ranks have announced."""

    def result(self) -> list[list[int]]:
        """Wait for it: each rank's integers, in order."""


class Lockstep:
    """What the ranks do together between two ends of backwards.

    Args:
        announce: Tells all ranks these integers, and gives those of all; None on a single rank.
        names: Of the weights, by the index that a :class:`Gather` has. More may be added, on all ranks.
        gather: Gathers weights from all ranks: those of the first argument; those of the second stay gathered here.
        contribute: Takes part in a reduction, with gradients of zero; tells whether it had to empty this rank's own
            buckets for that.

    Attributes:
        astray: Whether this rank has done something else than what was expected.
        differ: The ranks have announced different things.
        count: Rounds of announcements so far.
    """

    def __init__(
        self,
        announce: Callable[[Sequence[int]], Announced] | None,
        names: Sequence[str],
        gather: Callable[[Iterable[int], Iterable[int]], None],
        contribute: Callable[[Flush], bool],
    ) -> None:
        self._send, self._names = announce, names
        self._gather, self._contribute = in_step()(gather), in_step()(contribute)
        self._foresight = Foresight(memory=3)
        self._ending: tuple[End, Announced] | None = None
        self._resets = Fingerprint()
        self.astray, self.differ = _ON_TRACK, False
        self.count = 0

    @property
    def diverged(self) -> bool:
        """Whether this rank has to expect that the others do something else."""
        return self.astray != _ON_TRACK or self.differ

    def expect_by(self, mode: int) -> None:
        """Expect other events than in other modes. All ranks call it, between the same two ends."""
        self._foresight.mode = mode

    def follows(self, event: Event) -> bool:
        """Whether the event is expected next; if another is, that and all after it are done now, with the others."""
        expected = self._expected()
        if expected is None:
            return False
        if event == expected:
            self._foresight.passed(event)
            return True
        self.astray = _ASTRAY
        while expected is not None:
            self._foresight.passed(expected, is_all=False)
            if isinstance(expected, Gather):
                self._gather(expected.indices, ())
            elif not isinstance(expected, Reset):
                flush = expected.flush if isinstance(expected, End) else expected
                if self._contribute(flush):
                    self.astray = _TOOK_BACK
            expected = self._expected()
        return False

    def _expected(self) -> Gather | Reset | Flush | End | None:
        """What all ranks do next, without a message.

        Nobody could make up for a rank's part of a copy that it has not made. So ranks announce each copy, and what
        comes instead of one.
        """
        expected = None if self.differ else self._foresight.next()
        return None if isinstance(expected, Copy | Write) else expected

    def meet(self, event: Gather | Copy | Write | Reset | Flush, is_done: Callable[[], bool] = bool) -> bool:
        """Come to an event.

        Args:
            event: The event.
            is_done: Whether it was done meanwhile, with what the others expected of this rank.

        Returns:
            Whether all ranks have: it may be done. What a rank is to gather is gathered, if not.
        """
        return self._send is None or self.follows(event) or (not is_done() and self._agree(event))

    def note(self, event: Reset) -> None:
        """Come to an event that needs no other rank; that all have come to it shows at the end."""
        if self._send is not None:
            self._resets.note(self._foresight.count)
            # Where a copy is expected, other ranks may make it: this one must not be further than they are.
            if not self.follows(event) and not isinstance(self._foresight.next(), Copy | Write):
                self._foresight.passed(event)

    def begin_end(self, event: End) -> bool:
        """A backward has come to its end.

        Returns:
            Whether it may be reduced: all ranks do so, or are expected to.
        """
        if self._send is None:
            return True
        if self.follows(event):
            self._ending = event, self._announce(event)
            return True
        return self._agree(event)

    def end(self) -> bool:
        """What there was to reduce at the end of the backward is reduced.

        Returns:
            Whether all ranks have done the same since the last end. All of them know, and are at the same place.
        """
        if self._ending is not None:
            (event, announcement), self._ending = self._ending, None
            self._agree(event, announcement)
        alike, self.astray, self.differ = not self.diverged, _ON_TRACK, False
        self._resets = Fingerprint()
        if alike:
            self._foresight.end()
        else:
            self._foresight.forget()
        return alike

    def _announce(self, event: Event) -> Announced:
        assert self._send is not None
        self.count += 1
        wanted = [0] * -(-len(self._names) // _BITS)
        if isinstance(event, Gather):
            for index in event.indices:
                wanted[index // _BITS] |= 1 << index % _BITS
            fingerprint = 0
        elif isinstance(event, Copy):
            fingerprint = event.weight
        elif isinstance(event, Write):
            fingerprint = 0
        elif isinstance(event, End):
            fingerprint = hash((event.flush.fingerprint, self._resets.value)) >> 1
        else:
            fingerprint = event.fingerprint
        return self._send([_KINDS.index(type(event)), self.astray, fingerprint, *wanted])

    def _wait(self, event: Event, announcement: Announced) -> list[list[int]]:
        try:
            return announcement.result()
        except RuntimeError as error:
            what = "an end of its backward"
            if isinstance(event, Gather):
                what = f"the weights of {', '.join(repr(self._names[index]) for index in event.indices)}"
            elif isinstance(event, Copy):
                what = f"a copy of the weight {self._names[event.weight]!r}"
            elif isinstance(event, Write):
                what = "a write to a weight"
            elif not isinstance(event, End):
                what = "a forward of the whole module" if isinstance(event, Reset) else "a reduction of gradients"
            raise RuntimeError(
                f"This rank waited for the others for {what}, and they did not come. One of them has ended, or waits"
                " elsewhere: a module that only some ranks run must not be followed by `send`, `recv`, `new_group` or a"
                " collective of some of the ranks. Let every rank run the module, or use stage 2."
            ) from error

    def _agree(self, event: Event, announcement: Announced | None = None) -> bool:
        """Announce an event until all ranks have come to it, or this one is free to go on."""
        passed = announcement is not None
        while True:
            answers = self._wait(event, announcement or self._announce(event))
            announcement = None
            if all(answer == answers[0] for answer in answers):
                if self.astray == _ASTRAY and not self.differ:
                    self.astray = _ON_TRACK  # all have done the same
                if not passed:
                    # Upstream compares the order of modules, and nobody else could take part in that.
                    is_all = event.is_all if isinstance(event, End) else not isinstance(event, Reset)
                    self._foresight.passed(event, is_all)
                return not (isinstance(event, End) and self.diverged)
            self.differ = True
            wanted = [index for answer in answers if _KINDS[answer[0]] is Gather for index in _indices(answer[3:])]
            if wanted:
                self._gather(sorted(set(wanted)), event.indices if isinstance(event, Gather) else ())
                if isinstance(event, Gather | Copy):
                    return False
            elif not isinstance(event, End) or all(_KINDS[answer[0]] is End for answer in answers):
                return False


def _indices(words: list[int]) -> Iterable[int]:
    return (at * _BITS + bit for at, word in enumerate(words) if word for bit in range(_BITS) if word >> bit & 1)
