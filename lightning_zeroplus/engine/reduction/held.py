"""Windows: gradients that wait on this rank until several backwards are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from lightning_zeroplus.engine.reduction.life import Life
from lightning_zeroplus.engine.reduction.local_sums import Guard, LocalSums, Reduction, within_budget
from lightning_zeroplus.engine.reduction.streams import streams_matter
from lightning_zeroplus.engine.reduction.wire_dtypes import grad_bytes, sum_dtype_of, whole_numel
from lightning_zeroplus.gradients.shown import ShownGradients
from lightning_zeroplus.gradients.window_report import WindowReport

if TYPE_CHECKING:
    from lightning_zeroplus.engine.host import EngineHost

#: On the CPU so many buckets of gradients wait for the step; see the default of ``reduce_bucket_size``.
_WAITING_BUCKETS = 4


class HoldsGradients:
    """The part of a gradient accumulation that windows and ``no_sync()`` use."""

    engine: EngineHost
    params: list[nn.Parameter]
    local_sums: LocalSums
    optimized: frozenset[int]
    guard: Guard | None
    life: Life
    shown: ShownGradients
    optimizer: Any
    hooks_reduce: bool
    reduce_if_needed: Callable[[], None]
    reduce: Callable[[frozenset[int]], None]
    _members: set[int]
    averaged: set[int]
    keeps_parts: bool
    window_sum: Callable[[int], Tensor | None]
    note_outside: Callable[[bool], None]
    follow_outside: Callable[[], None]
    unsynced: bool
    synced: frozenset[int]
    _evaluates = False
    _holds_own = False
    _follows = False

    def when_to_reduce(self, reduction: str) -> Reduction:
        """``"backward"`` or ``"step"``. ``"auto"``: the latter, unless hooks would reduce many gradients."""
        if reduction == "auto":
            return "step" if not self.hooks_reduce or self._is_little() else "backward"
        return cast(Reduction, reduction)

    def _is_little(self) -> bool:
        """Whether a few buckets hold the gradients of all parameters, on the CPU."""
        optimizer = self.optimizer
        others = ("overlap_comm", "cpu_offload", "offload_optimizer")  # the user's choice between time and memory
        if streams_matter() or any(getattr(optimizer, name, False) for name in others):
            return False
        elements = sum(whole_numel(self.params[index]) for index in self.optimized)
        return elements <= _WAITING_BUCKETS * optimizer.reduce_bucket_size

    def open_window(self, max_bytes: int | None) -> WindowReport:
        """Defer what fits into ``max_bytes`` until :meth:`close_window`; see :func:`~.local_sums.within_budget`."""
        sizes = [grad_bytes(param) for param in self.params]
        only = None
        if max_bytes is not None:
            itemsize = max((sum_dtype_of(param).itemsize for param in self.params), default=4)
            only = within_budget(sizes, self.engine.zero_reduce_bucket_size() * itemsize, max_bytes)
        self.local_sums.open_window(only)
        chosen = [size for index, size in enumerate(sizes) if size and (only is None or index in only)]
        return WindowReport(len(chosen), sum(chosen), sum(size > 0 for size in sizes), sum(sizes))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around a validation step: its ``loss.backward()`` is this rank's own. DDP reduces those of the training."""
        self._evaluates = True
        try:
            yield
        finally:
            self.held_in_evaluation()  # a backward may have raised
            self._evaluates = False

    def hold_in_evaluation(self) -> None:
        """The user's own backward begins."""
        if self._evaluates and not self._holds_own:
            self._holds_own = True
            self.local_sums.open_window()

    def held_in_evaluation(self) -> None:
        """The user's own backward is done: what it has brought waits."""
        if self._holds_own:
            self._holds_own = False
            self.local_sums.close_window()

    @property
    def holding(self) -> bool:
        """A window or ``no_sync()`` is open."""
        return self.local_sums.holding

    def reduce_unless_held(self, until_step: bool) -> None:
        """A backward has ended: reduce what it has left, and show it in gradients that the user has kept.

        Args:
            until_step: The step reduces, or whatever shows gradients before it.
        """
        if not self.local_sums.holding:
            if not until_step:
                self.reduce_if_needed()
            self.follow_outside()
            self.shown.follow()
        elif not until_step and self.local_sums.only is not None and self.life.is_waiting and not self.hooks_reduce:
            self.local_sums.settle()
            self.reduce(frozenset(self._members - self.local_sums.only))

    def note_synced(self, was_held: bool) -> None:
        """A backward begins: note which gradients that wait are averages under DDP.

        Args:
            was_held: The backward before was not to reduce.
        """
        self._follows = False
        if was_held or self.life.is_empty:
            return
        if not self.unsynced:
            self._follows = self.life.is_waiting and not self.takes_averages_for_hooks  # type: ignore[attr-defined]
            return
        members = range(len(self.params)) if self.life.is_waiting else ()
        waiting = frozenset(index for index in members if self.window_sum(index) is not None)
        self.synced = waiting.union(self.averaged if self.keeps_parts else ())

    def was_synced(self, index: int) -> bool:
        """In a backward: whether what waits from before is an average under DDP, or a part of one."""
        return self._follows or index in self.synced

    def close_window(self) -> None:
        """End the innermost :meth:`open_window`: what waits is reduced now, or by the step."""
        self.local_sums.close_window()
        self.unsynced = False
        self.note_outside(False)

    def held(self) -> AbstractContextManager[None]:
        """Defer all gradients within."""
        return self.local_sums.held()

    def reduce_next_backward(self) -> None:
        """Let the next backward reduce what it reaches, although gradients are held."""
        self.local_sums.reduces_next_backward = True

    def expect_announcement(self) -> None:
        """Someone opens windows and announces the last backward of a step: defer in windows only.

        Hooks reduce in that backward then. Where its gradients are added to sums that lie in ``param.grad``, without a
        hook, it waits for the step as the others do: that takes less time than hooks can hide on a CPU.
        """
        if not self.local_sums.all_in_grads(self.optimized):
            self.local_sums.until_step = False

    def check_not_held(self) -> None:
        """Refuse a step while gradients are held.

        Raises:
            RuntimeError: Within ``no_sync()`` or a window; nothing was changed.
        """
        if self.guard is not None:
            self.guard.before_step()
        if self.local_sums.holding:
            raise RuntimeError(
                "optimizer.step() inside no_sync(): the gradients of this rank are not reduced yet, and the ranks would"
                " diverge. Leave no_sync() before the last backward of the step."
            )

    def held_bytes(self) -> int:
        """Bytes of local gradients that wait for a reduction."""
        return sum(grad.nbytes for grad in self.local_sums.sums.values())
