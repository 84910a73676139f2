"""Which samples a test is drawn for: its name decides, so that a new test moves no other."""

from __future__ import annotations

import zlib


def turn(name: str) -> int:
    """A number that stays the same when others are added."""
    return zlib.crc32(name.encode())
