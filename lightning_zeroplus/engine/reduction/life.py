"""The life of a gradient between two steps: its states, and which event leads from which state to which.

A backward brings gradients. Each is reduced at once, or waits on its rank. A step uses the averages. There are two
states, because a backward may run while earlier gradients wait or are averaged: the :class:`Phase` of all gradients
since the last step, and the :class:`Place` of one parameter's gradient in the backward that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto


class _Alike(Enum):
    """Members are hashed by identity, as they are compared: Enum's own hash is a call of Python code per look-up."""

    __hash__ = object.__hash__


class Phase(_Alike):
    """What there is between two steps.

    Attributes:
        EMPTY: No parameter has received a gradient since the last step or ``zero_grad()``.
        WAITING: Some gradient of this rank waits to be reduced.
        AVERAGED: There are gradients, and none waits: they are averaged, or the backward that runs reduces them.
    """

    EMPTY = auto()
    WAITING = auto()
    AVERAGED = auto()


class Place(_Alike):
    """Where a parameter's gradient is in the backward that runs.

    Attributes:
        NOWHERE: There is none, or it waits in a local sum.
        ARRIVING: Autograd is about to add it to ``param.grad``. The parameter's hook comes next.
        IN_FLIGHT: It is in a bucket, or was reduced from one. ``param.grad`` may be a view of the bucket.
    """

    NOWHERE = auto()
    ARRIVING = auto()
    IN_FLIGHT = auto()


class Event(_Alike):
    """What happens to gradients.

    Attributes:
        COMES: Autograd brings a gradient.
        WAITS: A gradient that comes waits for more than the end of its backward.
        HOOKED: The parameter's hook was called, and upstream gets the gradient.
        HELD: The parameter's hook was called, and the gradient goes to the local sum.
        TAKEN_BACK: A gradient is taken out of its bucket, to the local sum.
        FLUSHED: All buckets are reduced.
        REDUCED: What waited is averaged over the ranks.
        SET: Averaged gradients are set by the user, or put back.
        DROPPED: A step has used the gradients, or ``zero_grad()`` has dropped them.
    """

    COMES = auto()
    WAITS = auto()
    HOOKED = auto()
    HELD = auto()
    TAKEN_BACK = auto()
    FLUSHED = auto()
    REDUCED = auto()
    SET = auto()
    DROPPED = auto()


_E, _W, _A = Phase
#: By event and phase, the phase that follows. Other events leave the phase alone.
PHASES: Mapping[Event, Mapping[Phase, Phase]] = {
    Event.COMES: {_E: _A, _W: _W, _A: _A},
    Event.WAITS: {_W: _W, _A: _W},  # it has come before
    Event.REDUCED: {_E: _E, _W: _A, _A: _A},
    Event.SET: {_E: _A, _W: _W, _A: _A},
    Event.DROPPED: {_E: _E, _W: _E, _A: _E},
}

_N, _R, _F = Place
#: By event and place, the place that follows. Other events leave the place alone.
PLACES: Mapping[Event, Mapping[Place, Place]] = {
    Event.COMES: {_N: _R, _R: _R, _F: _R},  # in flight: the buckets are flushed before autograd adds to it
    Event.HOOKED: {_R: _F},
    Event.HELD: {_R: _N},
    Event.TAKEN_BACK: {_N: _N, _R: _R, _F: _N},
    Event.FLUSHED: {_N: _N, _R: _R, _F: _N},
    Event.DROPPED: {_N: _N, _R: _R, _F: _N},  # a user's hook may drop gradients while one arrives
}


class Life:
    """The states of an accumulation's gradients.

    Args:
        changed: Called when the phase has changed.

    Attributes:
        phase: Of all gradients since the last step.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self.phase = Phase.EMPTY
        self._changed = changed
        self._arriving: set[int] = set()
        self._in_flight: set[int] = set()
        self._at = {Place.ARRIVING: self._arriving, Place.IN_FLIGHT: self._in_flight}

    def place(self, index: int) -> Place:
        """Where the gradient of the parameter with this index is."""
        if index in self._arriving:
            return Place.ARRIVING
        return Place.IN_FLIGHT if index in self._in_flight else Place.NOWHERE

    @property
    def is_empty(self) -> bool:
        """Whether no parameter has received a gradient since the last step or ``zero_grad()``."""
        return self.phase is Phase.EMPTY

    @property
    def is_waiting(self) -> bool:
        """Whether some gradient waits to be reduced."""
        return self.phase is Phase.WAITING

    @property
    def is_any_in_flight(self) -> bool:
        """Whether a gradient is in a bucket, or was reduced from one in a backward that has not ended."""
        return bool(self._at[Place.IN_FLIGHT])

    def goes_on(self, event: Event, indices: Iterable[int] | None = None) -> None:
        """Something happens.

        Args:
            event: What.
            indices: To the gradients of these parameters; None: to all.
        """
        self._phase_goes_on(event)
        places = PLACES.get(event)
        if places is not None and indices is None:
            for place, there in [(place, list(there)) for place, there in self._at.items() if there]:
                assert place in places, f"{event} while gradients are {place}"
                if places[place] is not place:
                    self._move(there, place, places[place])
        elif places is not None and indices is not None:
            for index in indices:
                self._one_goes_on(event, index, places)

    def one_goes_on(self, event: Event, index: int) -> Place:
        """The same for one gradient, in little time: it is called twice for each gradient of each backward.

        Returns:
            Where it was.
        """
        if (phases := PHASES.get(event)) is not None:
            self._phase_follows(event, phases)
        return self._one_goes_on(event, index, PLACES[event])

    def stays(self, index: int) -> None:
        """A gradient has come, and stays in ``param.grad``; in little time, too."""
        self._arriving.discard(index)

    def _one_goes_on(self, event: Event, index: int, places: Mapping[Place, Place]) -> Place:
        place = _R if index in self._arriving else _F if index in self._in_flight else _N
        assert place in places, f"{event} of gradient {index}, which is {place}"
        following = places[place]
        if following is not place:
            if place is not _N:
                self._at[place].remove(index)
            if following is not _N:
                self._at[following].add(index)
        return place

    def _phase_goes_on(self, event: Event) -> None:
        phases = PHASES.get(event)
        if phases is not None:
            self._phase_follows(event, phases)

    def _phase_follows(self, event: Event, phases: Mapping[Phase, Phase]) -> None:
        assert self.phase in phases, f"{event} in {self.phase}"
        before, self.phase = self.phase, phases[self.phase]
        if self.phase is not before:
            self._changed()

    def _move(self, indices: Iterable[int], place: Place, following: Place) -> None:
        if place is not Place.NOWHERE:
            self._at[place].difference_update(indices)
        if following is not Place.NOWHERE:
            self._at[following].update(indices)
