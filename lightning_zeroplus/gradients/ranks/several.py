"""One lockstep for several models: each has its own engine, and a rank may run a model that the others do not run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar
from weakref import WeakMethod

import torch.distributed as dist

from lightning_zeroplus.gradients.ranks.agreement import Announcement, end_group, new_group_of_hosts
from lightning_zeroplus.gradients.ranks.lockstep import End, Flush, Gather, Lockstep, Reset
from lightning_zeroplus.gradients.ranks.own_collectives import meeting_before_collectives

_Event = TypeVar("_Event", bound=Gather | Reset | Flush | End)


class LockstepGroup:
    """The models that keep step with each other on all ranks: those of one Fabric, or the only one of a Trainer.

    Without it, one model's gather on one rank could meet another model's gather on another rank.
    """

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._names: list[str] = []
        self._lockstep: Lockstep | None = None
        self._open = ExitStack()

    def join(self, names: list[str], **callbacks: Any) -> Member:
        """Add a model. All ranks do so together, and in the same order.

        Args:
            names: Of its weights, in the order of the indices in its events.
            **callbacks: See :class:`Member`; its methods are referred to weakly.
        """
        if self._lockstep is None:
            self._lockstep = self._begin()
        member = Member(self, len(self._members), len(self._names), len(names), **callbacks)
        self._names += names
        self._members.append(member)
        return member

    def _begin(self) -> Lockstep:
        announce = None
        if dist.get_world_size() > 1:
            group = new_group_of_hosts()
            self._open.callback(end_group, group)
            self._open.enter_context(meeting_before_collectives(self._meet_at_collective))
            announce = partial(Announcement, group=group)
        return Lockstep(announce, self._names, self._gather, self._contribute)

    @property
    def lockstep(self) -> Lockstep:
        """The lockstep of all members."""
        assert self._lockstep is not None, "no model has joined"
        return self._lockstep

    def leave(self, member: Member) -> None:
        """The engine of a model is closed; after the last of them, so is the group."""
        member.is_there = False
        if not any(each.is_there for each in self._members):
            self._open.close()
            self._members.clear()
            self._names.clear()
            self._lockstep = None

    def sync(self, number: int) -> bool:
        """Forwards have come to their end that no backward follows, on all ranks.

        Args:
            number: That this rank brings along.

        Returns:
            Whether all ranks have done the same since the last end, and brought the same number.
        """
        self.lockstep.begin_end(End(Flush(number, None, ())))
        return self.end()

    def end(self) -> bool:
        """See :meth:`.Lockstep.end`; then every model reduces what the ranks have not reduced together."""
        alike = self.lockstep.end()
        for member in self._members:
            member.rejoin(alike)
        return alike

    def _meet_at_collective(self) -> None:
        if all(member.is_free() for member in self._members):
            self.sync(0)

    def _gather(self, indices: Iterable[int], kept: Iterable[int]) -> None:
        wanted, needed = list(indices), list(kept)
        for member in self._members:
            own = member.own(wanted)
            if own:
                member.gather(own, member.own(needed))

    def _contribute(self, flush: Flush) -> bool:
        if not flush.members:
            return False
        (member,) = [each for each in self._members if each.has(flush.members[0][0])]
        return member.contribute(member.of_one(flush))


class Member:
    """A model among others that keep step: for its engine it is a lockstep of its own.

    Args:
        group: All models.
        number: Of this model among them.
        first: The index of its first weight among those of all models.
        count: The number of its weights.
        gather: See :class:`.Lockstep`, and so is the next.
        contribute: See there.
        rejoin: Called at the end of each backward, of any model; with whether all ranks have done the same.
        is_free: Whether this model's engine may meet the others now.
    """

    def __init__(
        self,
        group: LockstepGroup,
        number: int,
        first: int,
        count: int,
        gather: Callable[[Iterable[int], Iterable[int]], None],
        contribute: Callable[[Flush], bool],
        rejoin: Callable[[bool], None],
        is_free: Callable[[], bool],
    ) -> None:
        self._group, self._number, self._first, self._count = group, number, first, count
        self._gather, self._contribute = WeakMethod(gather), WeakMethod(contribute)
        self._rejoin, self._is_free = WeakMethod(rejoin), WeakMethod(is_free)
        self.is_there = True

    # -- what the engine calls --------------------------------------------------------------------------------------

    @property
    def diverged(self) -> bool:
        """See :class:`.Lockstep`, and so are the other methods."""
        return self._group.lockstep.diverged

    @property
    def count(self) -> int:
        return self._group.lockstep.count

    def meet(self, event: Gather | Reset | Flush, is_done: Callable[[], bool] = bool) -> bool:
        return self._group.lockstep.meet(self._of_all(event), is_done)

    def note(self, event: Reset) -> None:
        self._group.lockstep.note(self._of_all(event))

    def begin_end(self, event: End) -> bool:
        return self._group.lockstep.begin_end(self._of_all(event))

    def end(self) -> bool:
        return self._group.end()

    def sync(self, number: int) -> bool:
        return self._group.sync(number)

    def leave(self) -> None:
        self._group.leave(self)

    # -- what the group calls ---------------------------------------------------------------------------------------

    def has(self, index: int) -> bool:
        """Whether this index, among the weights of all models, is one of this model's."""
        return self._first <= index < self._first + self._count

    def own(self, indices: Iterable[int]) -> list[int]:
        """Those of these indices that are this model's, as it counts them."""
        return [index - self._first for index in indices if self.has(index)]

    def of_one(self, flush: Flush) -> Flush:
        """The flush as this model knows it."""
        return flush._replace(members=tuple(self._shifted(flush.members, -self._first)))

    def gather(self, indices: list[int], kept: list[int]) -> None:
        self._call(self._gather)(indices, kept)

    def contribute(self, flush: Flush) -> bool:
        return self._call(self._contribute)(flush)

    def rejoin(self, alike: bool) -> None:
        if self.is_there:
            self._call(self._rejoin)(alike)

    def is_free(self) -> bool:
        is_free = self._is_free()
        return not self.is_there or is_free is None or is_free()

    def _call(self, method: WeakMethod[Any]) -> Any:
        return method() or (lambda *_: None)  # an engine that nobody has any more, on any rank

    def _of_all(self, event: _Event) -> _Event:
        """The event with the indices of all models; an event of the first model is the same."""
        if not self._number:
            return event
        of_all: Any
        if isinstance(event, Gather):
            of_all = Gather(tuple(index + self._first for index in event.indices))
        elif isinstance(event, End):
            of_all = End(self._of_all(event.flush), event.is_all)
        else:
            of_all = event._replace(fingerprint=hash((self._number, event.fingerprint)) >> 2)
            if isinstance(event, Flush):
                of_all = of_all._replace(members=tuple(self._shifted(event.members, self._first)))
        return of_all

    @staticmethod
    def _shifted(members: Iterable[tuple[int, Any]], by: int) -> Iterator[tuple[int, Any]]:
        return ((index + by, dtype) for index, dtype in members)
