"""The policy of windows: when gradients are reduced, and what is refused meanwhile. Independent of any engine."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from lightning.pytorch.utilities.exceptions import MisconfigurationException

_Report = TypeVar("_Report", covariant=True)


class Reducer(Protocol[_Report]):
    """The part of an engine that a window uses: it holds gradients back, and reduces or drops them."""

    def open_window(self, max_bytes: int | None) -> _Report:
        """Hold back the gradients of the following backwards, up to ``max_bytes``, and report how many."""

    def reduce_next_backward(self) -> None:
        """Let the next backward reduce."""

    def close_window(self, reduce: bool) -> None:
        """Stop holding gradients back. Reduce them, or drop every gradient since the step without any collective."""


class GradientWindow(Generic[_Report]):
    """At most one open window, in which any number of backwards share one reduction.

    The strategy opens it with :meth:`coalesce`. The engine reports each backward, step and ``zero_grad()`` to it.

    Args:
        reducer: Returns the current engine.
    """

    def __init__(self, reducer: Callable[[], Reducer[_Report]]) -> None:
        self._reducer = reducer
        self._open: Coalesce[_Report] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a window is open."""
        return self._open is not None

    def coalesce(self, backwards: int | None, max_bytes: int | None) -> Coalesce[_Report]:
        """See :meth:`lightning_zeroplus.ZeroPlusStrategy.coalesce`."""
        for name, value in (("backwards", backwards), ("max_bytes", max_bytes)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise MisconfigurationException(f"`coalesce({name}={value!r})`: give a positive integer, or None.")
        return Coalesce(self, backwards, max_bytes)

    def check_closed(self) -> None:
        """Close a window that is still open, dropping its gradients.

        Raises:
            RuntimeError: If there was one.
        """
        if self._open is not None:
            self._open.close(reduce=False)
            raise RuntimeError(
                "A coalesce() window is still open at the end of training_step: its gradients were dropped, because"
                " the next step would mix with them. Open it with `with self.trainer.strategy.coalesce():`."
            )

    # -- called by the engine ---------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Count a backward. The last announced backward reduces by itself."""
        if self._open is not None:
            self._open.count_backward()

    def before_step(self) -> None:
        """Refuse to step in a window.

        Raises:
            RuntimeError: If a window is open; nothing has been changed.
        """
        if self._open is not None:
            raise RuntimeError(
                "optimizer.step() inside a coalesce() window: its gradients are not reduced yet. Step after the window."
            )

    def before_zero_grad(self, pending: bool) -> None:
        """Refuse to drop the gradients of a window, because its backwards would be lost.

        Args:
            pending: Whether there are unreduced gradients that would be dropped.

        Raises:
            RuntimeError: If a window is open, has had a backward, and ``pending``; nothing has been changed.
        """
        if self._open is not None and self._open.count and pending:
            raise RuntimeError(
                "optimizer.zero_grad() inside a coalesce() window, after a backward: its gradients would be dropped."
                " Call it before the window, or before its first backward."
            )


class Coalesce(Generic[_Report]):
    """The context manager that :meth:`GradientWindow.coalesce` returns. Entering it returns the reducer's report.

    A class, because the garbage collector silently closes a generator that is never finished.
    """

    def __init__(self, window: GradientWindow[_Report], backwards: int | None, max_bytes: int | None) -> None:
        self._window = window
        self._backwards = backwards
        self._max_bytes = max_bytes
        self._reducer: Reducer[_Report] | None = None
        self.count = 0

    def __enter__(self) -> _Report:
        """Open the window.

        Raises:
            RuntimeError: If one is open.
        """
        if self._window._open is not None:
            raise RuntimeError("coalesce() inside a coalesce() window. Leave the outer one to reduce for both.")
        self._reducer = self._window._reducer()
        report = self._reducer.open_window(self._max_bytes)
        self.count = 0
        self._window._open = self
        return report

    def count_backward(self) -> None:
        """A backward begins. The last announced backward reduces by itself."""
        assert self._reducer is not None
        self.count += 1
        if self.count == self._backwards:
            self._reducer.reduce_next_backward()

    def close(self, reduce: bool) -> None:
        """Close the window: reduce what it holds, or drop every gradient since the last step."""
        assert self._reducer is not None
        self._window._open = None
        self._reducer.close_window(reduce)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Reduce. After an exception drop the gradients instead, without waiting for any other rank.

        Raises:
            RuntimeError: If there were more or fewer backwards than announced; the gradients are complete.
        """
        if self._window._open is not self:
            return  # closed at the end of training_step
        self.close(reduce=kind is None)
        if kind is None and self._backwards not in (None, self.count):
            raise RuntimeError(
                f"`coalesce(backwards={self._backwards})` saw {self.count} backwards. All gradients are reduced and"
                " complete, with more reductions than needed: announce the right number, or none."
            )
