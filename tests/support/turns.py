"""Which samples a test is drawn for: its name decides, and no order in which tests are collected."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any


def turn(name: str) -> int:
    """A number that stays the same when others are added."""
    return zlib.crc32(name.encode())


def draw(cases: Mapping[str, Mapping[str, Any]], every: int | None = None) -> set[str]:
    """A sample of a test's cases in which every value of a parameter occurs, if it has two cases or more on average.

    Args:
        cases: The parameters of each case, by its name.
        every: One in so many cases is drawn at least; None: no more than the values need.

    Returns:
        The names of the cases that are drawn, at least one.
    """
    count = 1 if every is None else math.ceil(len(cases) / every)
    values = {name: {(key, repr(value)) for key, value in params.items()} for name, params in cases.items()}
    distinct = Counter(key for key, _ in set().union(*values.values()))
    order = sorted(cases, key=turn)
    drawn: set[str] = set()
    seen: set[tuple[str, str]] = set()
    for name in order:
        new = {(key, value) for key, value in values[name] if 2 * distinct[key] <= len(cases)} - seen
        if new:
            drawn.add(name)
            seen |= new
    others = [name for name in order if name not in drawn]
    return drawn | {*others[: max(count - len(drawn), 0)]}
