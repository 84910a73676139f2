"""Windows of several backwards whose gradients stay on this rank until they are reduced together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning_zeroplus.gradients.window_report import WindowReport

if TYPE_CHECKING:
    from lightning_zeroplus.engine.accumulation import GradientAccumulation
    from lightning_zeroplus.gradients.module_buffers import BufferBroadcast


class HoldsGradients:
    """The part of an engine that ``no_sync()`` and ``coalesce()`` use."""

    gradient_accumulation: GradientAccumulation | None
    buffers: BufferBroadcast | None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within only accumulate on this rank, at every stage, as under DDP's ``no_sync()``.

        The next backward after it reduces, and what that does not reach is reduced at its end.
        """
        assert self.gradient_accumulation is not None, "no_sync() needs an engine with an optimizer"
        assert self.buffers is not None
        with self.gradient_accumulation.local_sums.held(), self.buffers.accumulating():
            yield

    def open_window(self, max_bytes: int | None) -> WindowReport:
        """Defer the gradients of the following backwards until :meth:`close_window`; only so many bytes, if given."""
        assert self.gradient_accumulation is not None, "coalescing needs an engine with an optimizer"
        return self.gradient_accumulation.open_window(max_bytes)

    def reduce_next_backward(self) -> None:
        """Let the next backward reduce what it reaches, although gradients are held."""
        assert self.gradient_accumulation is not None
        self.gradient_accumulation.local_sums.reduces_next_backward = True

    def close_window(self, reduce: bool) -> None:
        """End :meth:`open_window`.

        Args:
            reduce: Reduce what was deferred, unless the step does. If False, which launches no collective, every
                gradient since the last step is dropped: some may be reduced already, in part.
        """
        accumulation = self.gradient_accumulation
        assert accumulation is not None
        accumulation.local_sums.close_window()
        if not reduce:
            accumulation.zero_grad()
        elif accumulation.reduction == "backward":
            accumulation.reduce_if_needed()
