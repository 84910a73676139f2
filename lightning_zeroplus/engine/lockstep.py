"""Stage 3 where ranks run different modules: every rank takes part in the others' gathers.

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
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist

from lightning_zeroplus.engine.branches import _END, _FULL, _NESTED, Flush, Foresight
from lightning_zeroplus.gradients.agreement import Announcement, Fingerprint

if TYPE_CHECKING:
    from lightning_zeroplus.engine.coalesce import Deferral
    from lightning_zeroplus.engine.gathers import Gathers

# Of an integer that is announced.
_BITS = 62


class Gather(NamedTuple):
    """Weights are gathered.

    Attributes:
        params: The parameters, by index.
    """

    params: tuple[int, ...]


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


Event: TypeAlias = Gather | Reset | Flush | End
_KINDS: tuple[type, ...] = (Gather, Reset, Flush, End)
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
        names: Of the parameters.
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
        self._send, self._names, self._words = announce, names, -(-len(names) // _BITS)
        self._gather, self._contribute = gather, contribute
        self._foresight = Foresight(memory=3)
        self._ending: tuple[End, Announced] | None = None
        self._resets = Fingerprint()
        self.astray, self.differ = _ON_TRACK, False
        self.count = 0

    @property
    def parted(self) -> bool:
        """Whether this rank has to expect that the others do something else."""
        return self.astray != _ON_TRACK or self.differ

    def follows(self, event: Event) -> bool:
        """Whether the event is expected next; if another is, that and all after it are done now, with the others."""
        expected = self._foresight.next()
        if expected is None:
            return False
        if event == expected:
            self._foresight.passed(event)
            return True
        self.astray = _ASTRAY
        while expected is not None:
            self._foresight.passed(expected, is_all=False)
            if isinstance(expected, Gather):
                self._gather(expected.params, ())
            elif not isinstance(expected, Reset):
                flush = expected.flush if isinstance(expected, End) else expected
                if self._contribute(flush):
                    self.astray = _TOOK_BACK
            expected = self._foresight.next()
        return False

    def meet(self, event: Gather | Reset | Flush) -> bool:
        """Come to an event.

        Returns:
            Whether all ranks have: it may be done. What a rank is to gather is gathered, if not.
        """
        return self._send is None or self.follows(event) or self._agree(event)

    def note(self, event: Reset) -> None:
        """Come to an event that needs no other rank; that all have come to it shows at the end."""
        if self._send is not None:
            self._resets.note(self._foresight.count)
            if not self.follows(event):
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
        alike, self.astray, self.differ = not self.parted, _ON_TRACK, False
        self._resets = Fingerprint()
        if alike:
            self._foresight.end()
        else:
            self._foresight.forget()
        return alike

    def _announce(self, event: Event) -> Announced:
        assert self._send is not None
        self.count += 1
        wanted = [0] * self._words
        if isinstance(event, Gather):
            for index in event.params:
                wanted[index // _BITS] |= 1 << index % _BITS
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
                what = f"the weights of {', '.join(repr(self._names[index]) for index in event.params)}"
            elif not isinstance(event, End):
                what = "a forward of the whole module" if isinstance(event, Reset) else "a reduction of gradients"
            raise RuntimeError(
                f"This rank waited for the others for {what}, and they did not come. One of them has ended, or waits"
                " elsewhere: a module that only some ranks run, outside of `training_step` and Lightning's hooks,"
                " must not be followed by a collective of your own. Let every rank run it, or use stage 2."
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
                return not (isinstance(event, End) and self.parted)
            self.differ = True
            wanted = [index for answer in answers if _KINDS[answer[0]] is Gather for index in _indices(answer[3:])]
            if wanted:
                self._gather(sorted(set(wanted)), event.params if isinstance(event, Gather) else ())
                if isinstance(event, Gather):
                    return False
            elif not isinstance(event, End) or all(_KINDS[answer[0]] is End for answer in answers):
                return False


def _indices(words: list[int]) -> Iterable[int]:
    return (at * _BITS + bit for at, word in enumerate(words) if word for bit in range(_BITS) if word >> bit & 1)


class KeepsLockstep:
    """The side of a gradient accumulation that keeps the ranks in step; in place of comparing buckets only."""

    deferral: Deferral
    averaged: set[int]
    _flushed: set[int]

    def _begin_lockstep(self: Any, gathers: Gathers) -> None:
        self._gathers = gathers
        announce = partial(Announcement, group=self._group) if dist.get_world_size() > 1 else None
        self.lockstep = Lockstep(
            announce, [name for name, _ in self.engine.module.named_parameters()], gathers.together, self._take_part
        )
        gathers.keep_step(self.lockstep, self._index_by_ds_id)

    def _make_group(self) -> Any:
        return dist.new_group(backend="gloo")

    def _end_lockstep(self: Any) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _take_part(self: Any, flush: Flush) -> bool:
        if not flush.members:
            return False
        had_gradients = bool(self.in_buckets)
        if had_gradients:
            self.deferral.parted = True
            self._take_back()
        self._contribute_zeros(flush)
        return had_gradients

    def sync(self: Any, number: int = 0) -> bool:
        """Forwards have come to their end that no backward follows, on all ranks; see ``engine.meet``."""
        self.lockstep.begin_end(End(Flush(number, None, ())))
        return self._end_together()

    def _end_together(self: Any) -> bool:
        """Whether the ranks had done the same; else reduce what they have not reduced together."""
        alike = self.lockstep.end()
        self.deferral.parted = False
        if not alike:
            self._gathers.forget_trace()
            if not self.deferral.defers_all:
                self._reduce_deferred()
        return alike

    def reduce_if_needed(self: Any) -> None:
        """Average what the ranks have accumulated; one of them may still gather weights for more of it."""
        if self.unreduced:
            self.sync()
        super().reduce_if_needed()  # type: ignore[misc]

    def flush_full(self: Any, dtype: torch.dtype | None, upstream: Callable[[], None]) -> None:
        """Reduce the bucket of ``dtype`` by ``upstream``, unless the ranks differ: then all buckets are empty now."""
        if self._flushes or self._may_flush(dtype, _FULL):
            upstream()

    def _may_flush(self: Any, dtype: torch.dtype | None, moment: int) -> bool:
        if not self.deferral.parted:
            flush = self._flush(dtype, moment)
            if self.lockstep.meet(flush) and not self.deferral.parted:
                self._emptied(flush)
                self.averaged.update(index for index, _ in flush.members)
                return True
            self.deferral.parted = True
        self._take_back()
        return False

    def begin_flush(self: Any, nested: bool = False) -> None:
        """All buckets are about to be reduced: at the end of a backward, or because a parameter is in one of them."""
        self._at_the_end: Flush | None = None
        if self.deferral.defers_all:
            pass  # as under DDP's `no_sync`: the ranks need not do this equally often
        elif nested:
            self._may_flush(None, _NESTED)
        else:
            left = self._left_for_the_end()
            for number in left:
                self.filled.note(number)
            self._at_the_end = self._flush(None, _END)
            if not self.lockstep.begin_end(End(self._at_the_end, not left)):
                self.deferral.parted = True
                self._take_back()
        self._flushes = True

    def end_flush(self: Any, nested: bool = False) -> None:
        """Upstream has reduced all buckets."""
        self._flushes = False
        self._flushed.update(self.in_buckets)
        self.in_buckets.clear()
        if self._at_the_end is None:
            return
        self.filled = Fingerprint()
        if self._end_together():
            self.averaged.update(index for index, _ in self._at_the_end.members)
        self._flushed.clear()
