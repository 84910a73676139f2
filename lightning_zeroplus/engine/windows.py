"""Windows of several backwards whose gradients stay on this rank until they are reduced together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lightning_zeroplus.gradients.window_report import WindowReport

if TYPE_CHECKING:
    from lightning_zeroplus.engine.accumulation import GradientAccumulation
    from lightning_zeroplus.gradients.module_buffers import BufferBroadcast


class HoldsGradients:
    """The part of an engine that ``no_sync()`` and ``coalesce()`` use."""

    gradient_accumulation: GradientAccumulation | None
    buffers: BufferBroadcast | None
    _switched_off: ExitStack | None = None

    @property
    def require_backward_grad_sync(self) -> bool:
        """DDP's switch: while it is False, backwards only accumulate on this rank, as in ``no_sync()``."""
        return self.gradient_accumulation is None or not self.gradient_accumulation.holding

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if value == self.require_backward_grad_sync:
            return
        if value and self._switched_off is None:
            raise RuntimeError(
                "`require_backward_grad_sync = True` inside no_sync() or a coalesce() window: leave it instead."
            )
        if self._switched_off is None:
            self._switched_off = ExitStack()
            self._switched_off.enter_context(self.no_sync())
        else:
            self._switched_off.close()
            self._switched_off = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within only accumulate on this rank, at every stage, as under DDP's ``no_sync()``.

        The next backward afterwards reduces everything, at its end the gradients of parameters that it does not reach.
        """
        assert self.gradient_accumulation is not None, "no_sync() needs an engine with an optimizer"
        assert self.buffers is not None
        with self.gradient_accumulation.held(), self.buffers.accumulating():
            yield

    def is_alone_in_windows(self) -> bool:
        """Whether another backward like the last one needs no other rank: it only accumulates, with whole weights."""
        accumulation: Any = self.gradient_accumulation
        if accumulation is None or not accumulation.unsynced:
            return False
        return not hasattr(accumulation, "all_whole") or accumulation.all_whole.is_on  # stage 3

    def has_unshared_hooks(self) -> bool:
        """Whether this rank's user has hooks, unknown to other ranks, that see what a parameter has accumulated."""
        return self.gradient_accumulation is not None and self.gradient_accumulation.has_unshared_hooks()

    def waits_for_hooks(self) -> bool:
        """Whether some rank has such a hook, as far as all ranks know."""
        return self.gradient_accumulation is not None and bool(self.gradient_accumulation.awaited_hooks)

    def share_users_hooks(self) -> None:
        """Agree with all ranks on the parameters with such hooks."""
        if self.gradient_accumulation is not None:
            self.gradient_accumulation.share_users_hooks()

    def open_window(self, max_bytes: int | None) -> WindowReport:
        """Defer the gradients of the following backwards until :meth:`close_window`.

        Args:
            max_bytes: Most bytes of gradients to defer on each rank; None: all.
        """
        assert self.gradient_accumulation is not None, "coalescing needs an engine with an optimizer"
        return self.gradient_accumulation.open_window(max_bytes)

    def reduce_next_backward(self) -> None:
        """Let the next backward reduce what it reaches, although a window is open."""
        assert self.gradient_accumulation is not None
        self.gradient_accumulation.reduce_next_backward()

    def close_window(self, reduce: bool) -> None:
        """End :meth:`open_window`.

        Args:
            reduce: Reduce what was deferred, unless the step does that. If False, drop every gradient since the last
                step, without a collective: some may be partly reduced already.
        """
        accumulation = self.gradient_accumulation
        assert accumulation is not None
        accumulation.close_window()
        if not reduce:
            accumulation.zero_grad()
        elif accumulation.reduction == "backward":
            accumulation.reduce_if_needed()
        if reduce and not accumulation.holding:
            accumulation.follow_outside()
            accumulation.shown.follow()
