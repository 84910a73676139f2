"""The life of a gradient: every transition of the tables, and what real backwards do."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest.mock import patch

import pytest

from lightning_zeroplus.engine.accumulation import GradientAccumulation
from lightning_zeroplus.engine.reduction.life import PHASES, PLACES, Event, Life, Phase, Place
from tests.matrix.cells import Cell, run_cell
from tests.matrix.test_gradient_matrix import check

#: Events after each of which a life is in a phase, or a gradient in a place.
_TO_PHASE = {Phase.EMPTY: [], Phase.AVERAGED: [Event.COMES], Phase.WAITING: [Event.COMES, Event.WAITS]}
_TO_PLACE = {Place.NOWHERE: [], Place.ARRIVING: [Event.COMES], Place.IN_FLIGHT: [Event.COMES, Event.HOOKED]}


def _after(events: list[Event]) -> Life:
    life = Life()
    for event in events:
        life.goes_on(event, (3,))
    return life


@pytest.mark.parametrize(("event", "phase"), [*product(Event, Phase)])
def test_every_phase(event: Event, phase: Phase) -> None:
    life = _after(_TO_PHASE[phase])
    assert life.phase is phase
    following = PHASES.get(event, dict.fromkeys(Phase, phase)).get(phase)
    if following is None:
        with pytest.raises(AssertionError):
            life.goes_on(event, ())
        following = phase
    else:
        life.goes_on(event, ())
    assert life.phase is following
    assert (life.is_empty, life.is_waiting) == (following is Phase.EMPTY, following is Phase.WAITING)


@pytest.mark.parametrize(("event", "place", "every"), [*product(Event, Place, (False, True))])
def test_every_place(event: Event, place: Place, every: bool) -> None:
    life = _after(_TO_PLACE[place])
    life.phase = Phase.WAITING  # in which everything may happen
    assert life.place(3) is place
    following = PLACES.get(event, dict.fromkeys(Place, place)).get(place)
    if every and place is Place.NOWHERE:
        following = place  # what is nowhere is not asked
    if following is None:
        with pytest.raises(AssertionError):
            life.goes_on(event, None if every else (3,))
        following = place
    else:
        life.goes_on(event, None if every else (3,))
    assert life.place(3) is following and life.place(4) is Place.NOWHERE
    assert life.is_any_in_flight is (following is Place.IN_FLIGHT)


@pytest.mark.parametrize(("event", "place"), [(event, place) for event in PLACES for place in PLACES[event]])
def test_one_gradient_goes_on_as_all_do(event: Event, place: Place) -> None:
    one, every = _after(_TO_PLACE[place]), _after(_TO_PLACE[place])
    assert one.one_goes_on(event, 3) is place
    every.goes_on(event, (3,))
    assert (one.place(3), one.phase) == (every.place(3), every.phase)


def test_every_state_is_reached_and_left() -> None:
    for state, table in ((Phase, PHASES), (Place, PLACES)):
        assert {after for row in table.values() for after in row.values()} == set(state)
        assert {before for row in table.values() for before, after in row.items() if before is not after} == set(state)


def _transitions(cell: Cell) -> tuple[Any, set[str]]:
    """The cell's outcome; which transitions there were; and at its end no gradient may be somewhere."""
    seen: set[str] = set()
    upstream = Life.goes_on
    ends: list[bool] = []

    def goes_on(self: Life, event: Event, indices: Any = None) -> None:
        before = self.phase
        upstream(self, event, indices)
        seen.add(f"{event.name}: {before.name} {self.phase.name}")

    after_step = GradientAccumulation.after_step

    def ended(self: Any) -> None:
        after_step(self)
        ends.append(self.life.is_empty and not self.life.is_any_in_flight)

    with patch.object(Life, "goes_on", goes_on), patch.object(GradientAccumulation, "after_step", ended):
        outcome = run_cell(cell)
    assert ends and all(ends)
    return outcome, seen


@pytest.mark.parametrize("reduction", ["backward", "step"])
@pytest.mark.parametrize("stage", range(4))
def test_a_real_loop(ranks2: Any, stage: int, reduction: str) -> None:
    cell = Cell(stage, "several", reduction=reduction)
    outcomes, seen = zip(*ranks2.run(_transitions, cell), strict=True)
    check(cell, list(outcomes))
    for each in seen:
        assert "DROPPED: AVERAGED EMPTY" in each
        assert ("WAITS: AVERAGED WAITING" in each) == (stage < 2 or reduction == "step")
        assert ("REDUCED: WAITING AVERAGED" in each) == ("WAITS: AVERAGED WAITING" in each)
