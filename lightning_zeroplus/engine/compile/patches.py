"""Changes to modules, classes and objects of others, each of which is undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """Attributes that are replaced until :meth:`undo`, and others that are put back if somebody else replaces them."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``."""
        self.keep(owner, name)
        setattr(owner, name, value)

    def keep(self, owner: Any, name: str) -> None:
        """Put ``owner.name`` back later, whatever happens to it until then."""
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
        """Put everything back, last change first."""
        while self._undo:
            self._undo.pop()()
