"""The result of a check of the doctor."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: ``ok``: nothing to do. ``native``: torch, DeepSpeed or the machine has it. ``patched``: this package adds it.
#: ``unavailable``: missing, and training works without it. ``problem``: training may fail, hang or be wrong.
Status = Literal["ok", "native", "patched", "unavailable", "problem"]


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        section: The group of checks, such as ``"versions"``.
        name: The subject of the check.
        status: See :data:`Status`.
        detail: What was found, and what to do about a problem.
    """

    section: str
    name: str
    status: Status
    detail: str
