"""Temporary changes to modules, classes and objects of other packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """Replaces attributes, or keeps their values, and restores them in :meth:`undo`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` until :meth:`undo`."""
        self.keep(owner, name)
        setattr(owner, name, value)

    def keep(self, owner: Any, name: str) -> None:
        """Restore the current ``owner.name`` in :meth:`undo`, whatever replaces it until then."""
        before = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else getattr(owner, name, _ABSENT)

        def restore() -> None:
            if before is not _ABSENT:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)

        self._undo.append(restore)

    def call_later(self, function: Callable[[], object]) -> None:
        """Call ``function`` in :meth:`undo`."""
        self._undo.append(function)

    def undo(self) -> None:
        """Restore everything, last change first."""
        while self._undo:
            self._undo.pop()()
