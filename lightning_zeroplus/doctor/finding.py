"""What a check of the doctor has found."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: ``ok``: as it should be. ``native``: torch or DeepSpeed has it. ``patched``: this package adds it. ``unavailable``:
#: not here, and training works without. ``problem``: training will fail, hang or be wrong.
Status = Literal["ok", "native", "patched", "unavailable", "problem"]


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        section: What it belongs to, such as ``"versions"``.
        name: What was looked at.
        status: See :data:`Status`.
        detail: What was found, and what to do about a problem.
    """

    section: str
    name: str
    status: Status
    detail: str
