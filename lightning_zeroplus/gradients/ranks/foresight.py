"""Which collectives a backward consists of, if the loop is as regular as it was."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

#: So often a backward has to follow the same other one to be expected.
_TIMES = 2
_MOST_TIMES = 64
_MOST_EXPECTED = 100
_UNKNOWN: tuple[tuple[Hashable, ...], int, int] = ((), 0, _TIMES)


class Foresight:
    """Which collectives a backward is expected to consist of; the same on all ranks.

    Args:
        memory: By how many before it a backward is expected.

    Attributes:
        mode: What else it is expected by: something that is the same on all ranks, and changes only between backwards.
    """

    def __init__(self, memory: int = 1) -> None:
        self._memory = memory
        self.mode = 0
        # By what came before: what came then, how often in a row, and how often it has to.
        self._after: dict[Hashable, tuple[tuple[Hashable, ...], int, int]] = {}
        self._previous: tuple[Hashable, ...] = ()
        self._passed: list[Hashable] = []
        self._is_regular = True

    @property
    def count(self) -> int:
        """How many have passed in this backward."""
        return len(self._passed)

    @property
    def _before(self) -> Hashable:
        return self.mode, self._previous

    def next(self) -> Any:
        """The next one of this backward, if one is expected."""
        expected, times, needed = self._after.get(self._before, _UNKNOWN)
        at = len(self._passed)
        return expected[at] if times >= needed and at < len(expected) else None

    def passed(self, event: Hashable, is_all: bool = True) -> None:
        """All ranks have done the same.

        Args:
            event: What.
            is_all: There is nothing else that they do at the end of the backward; else it cannot be expected.
        """
        self._passed.append(event)
        self._is_regular = self._is_regular and is_all

    def end(self) -> None:
        """The backward is over. One without any, because all its gradients wait, is not counted."""
        if not self._passed:
            return
        passed, self._passed = tuple(self._passed), []
        expected, times, needed = self._after.pop(self._before, _UNKNOWN)
        if len(self._after) > _MOST_EXPECTED:
            self._after.clear()
        if self._is_regular:
            self._after[self._before] = passed, times + 1 if passed == expected else 1, needed
        elif times >= needed:
            # All ranks have done something else, as in every sixth step of some loops: be slower to expect it.
            self._after[self._before] = (), 0, min(2 * needed, _MOST_TIMES)
        self._is_regular = True
        self._previous = (*self._previous, passed)[-self._memory :]

    def forget(self) -> None:
        """The ranks have not done the same, or not what was expected of them."""
        self._after.clear()
        self._previous, self._passed, self._is_regular = (), [], True
