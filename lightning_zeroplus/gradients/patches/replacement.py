"""Replace a function or a switch of torch or DeepSpeed in the whole process, as long as anybody needs that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


class Replacement:
    """Replaces a function while at least one of its contexts is open; calling it gives a context.

    Args:
        owner: The module or class that has the function.
        name: The function's name there. A class may have inherited it.
        function: The replacement; or the value of a switch, which may have it already.
    """

    def __init__(self, owner: Any, name: str, function: Any) -> None:
        self._owner, self._name, self._function = owner, name, function
        self._users = 0
        self._replaced: Any = _ABSENT

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Replace the function within. If somebody else replaces it in the meantime, theirs stays."""
        if not self._users or self._there() is not self._function:
            self._replaced = self._there()
            setattr(self._owner, self._name, self._function)
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users and self._there() is self._function:
                self._give_back()

    def _there(self) -> Any:
        return vars(self._owner).get(self._name, _ABSENT)

    def _give_back(self) -> None:
        if self._replaced is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._replaced)
