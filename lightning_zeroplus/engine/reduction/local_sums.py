"""LocalSums: gradients that wait on their rank for one reduction instead of one per backward.

Where a parameter's gradient is deferred, its tensor is taken from ``param.grad`` and added to a local sum. No upstream
code sees it there, so nothing but :mod:`.exchange` reduces, clears or overwrites it. The sums have the dtype in which
the optimizer accumulates; see :func:`~lightning_zeroplus.gradients.dtype.expect_grad_dtype`.

Where parameters are whole, and a backward defers all of them, the sums lie in ``param.grad`` from that backward on, as
DDP's do: autograd adds to them, and nothing is called for a single gradient. They are taken out when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

from torch import Tensor, nn

from lightning_zeroplus.engine.reduction.streams import PARTITION, Writers, refuse_graph_capture, streams_matter
from lightning_zeroplus.gradients.dtype import expected_grad_dtype
from lightning_zeroplus.gradients.shown import read_plain, write_plain

#: When gradients are reduced.
Reduction = Literal["auto", "backward", "step"]


class Guard(Protocol):
    """Asked by the engine before it acts; raises to refuse."""

    def before_backward(self) -> None:
        """A backward begins."""

    def before_step(self) -> None:
        """``optimizer.step()`` was called."""

    def before_zero_grad(self, pending: bool) -> None:
        """``optimizer.zero_grad()`` was called; ``pending``: there are gradients."""


class LocalSums:
    """Which gradients wait, and their local sums.

    Args:
        hooks_reduce: Whether upstream's hooks would reduce during backward (stages 2 and 3).
        until_step: Defer in every backward, until the step.
        in_grads: The parameters whose sums may lie in ``param.grad``, by index in ``module.parameters()``; none of them
            if all gradients are there, and no sum is kept. None: gradients are taken out one by one.
        wake: Called when sums that lay in ``param.grad`` are taken out.

    Attributes:
        lie_in_grads: Autograd adds what it brings to the sums.
        hooked: The parameters that hooks have reduced since the last backward that deferred: what is left to reduce is
            without them. Hooks reduce the same parameters on all ranks, and which sums there are may differ.
        reduces_next_backward: The backward that runs reduces whatever it reaches, and what was deferred of it.
        diverged: The ranks' buckets differ: what is still to come in the backward that runs waits for its end.
        writers: The streams that have written sums and the partition; None where streams do not matter.
    """

    def __init__(
        self,
        hooks_reduce: bool,
        until_step: bool,
        in_grads: Mapping[int, nn.Parameter] | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._hooks_reduce = hooks_reduce
        self.until_step = until_step
        self._sums: dict[int, Tensor] = {}
        self._in_grads, self._wake = in_grads, wake
        self.lie_in_grads = False
        self.hooked: set[int] = set()
        self._follows_window = False
        self.reduces_next_backward = False
        self.diverged = False
        self.writers = Writers() if streams_matter() else None
        self._depth = 0
        self._only: frozenset[int] | None = None

    @property
    def sums(self) -> dict[int, Tensor]:
        """The local sums, by index of the parameter in ``module.parameters()``."""
        self.take_out()
        return self._sums

    @property
    def any_in_grads(self) -> bool:
        """Whether there are parameters whose sums may lie in ``param.grad``."""
        return self._in_grads is not None

    @property
    def in_grads(self) -> Iterable[nn.Parameter]:
        """The parameters whose sums may lie in ``param.grad``, where not all may."""
        return () if self._in_grads is None else self._in_grads.values()

    def all_in_grads(self, indices: frozenset[int]) -> bool:
        """Whether the sums of all these parameters may lie in ``param.grad``."""
        return self._in_grads is not None and (not self._in_grads or indices <= self._in_grads.keys())

    def may_lie_in_grad(self, index: int) -> bool:
        """Whether the sum of this parameter may lie in ``param.grad``."""
        return self._in_grads is not None and (not self._in_grads or index in self._in_grads)

    def waiting(self, index: int) -> Tensor | None:
        """The sum of one parameter, if it is not in ``param.grad``."""
        return self._sums.get(index)

    def replace(self, index: int, grad: Tensor | None) -> None:
        """Forget the sum of one parameter that is not in ``param.grad``; ``grad``, if any, is the sum from now on."""
        self._sums.pop(index, None)
        if grad is not None:
            self.put(index, grad.contiguous())

    def take_out(self) -> None:
        """Take the sums out of ``param.grad``."""
        if self.lie_in_grads and self._in_grads:
            self.lie_in_grads = False
            self._wake()
            for index, param in self._in_grads.items():
                self.add(index, param)

    def lay_in_grads(self) -> None:
        """Let autograd add to the sums, in a backward that defers all."""
        if self._in_grads is None or not self.defers_all:
            return
        self.lie_in_grads = True
        for index in self._in_grads.keys() & self._sums.keys():
            param, held = self._in_grads[index], self._sums[index]
            fits = param.shape == held.shape and expected_grad_dtype(param) in (None, held.dtype)
            if fits and read_plain(param) is None:
                write_plain(param, self._sums.pop(index))

    def lay_in_grad(self, index: int, param: nn.Parameter) -> None:
        """Lay the sum of one parameter, whose gradient comes, in ``param.grad``."""
        held = None if self.lie_in_grads and self.may_lie_in_grad(index) else self.sums.pop(index, None)
        if held is None:
            return
        if self.writers is not None:
            self.writers.wait(index)
            self.writers.use(held)
        dtype = expected_grad_dtype(param)
        write_plain(param, held if dtype is None else held.to(dtype))

    @property
    def holding(self) -> bool:
        """A window or ``no_sync()`` is open."""
        return self._depth > 0

    @property
    def only(self) -> frozenset[int] | None:
        """The parameters that the open window defers; None for all."""
        return self._only

    def defers(self, index: int) -> bool:
        """Whether this parameter's next gradient waits."""
        return self.diverged or self.holds(index)

    def holds(self, index: int) -> bool:
        """Whether it waits for more than the end of the backward that runs."""
        if not self._hooks_reduce:
            return True
        return self._waits and (self._only is None or index in self._only)

    @property
    def defers_all(self) -> bool:
        """Whether hooks have nothing to reduce."""
        return not self._hooks_reduce or (self._waits and self._only is None)

    @property
    def _waits(self) -> bool:
        return (self._depth > 0 or self.until_step) and not self.reduces_next_backward

    def begin_backward(self) -> None:
        """A backward begins: what it defers has not been reduced by any hook."""
        if self.writers is not None:
            refuse_graph_capture()
        if self._waits:
            self.hooked.clear()
        if not self.defers_all:
            self.take_out()
        self.lay_in_grads()

    def take(self, index: int, param: nn.Parameter) -> bool:
        """Move ``param.grad`` to the sum if it is deferred, else add what was deferred to ``param.grad``.

        Returns:
            Whether it is deferred.
        """
        if self.defers(index):
            if index in self.hooked:
                self.hooked.clear()  # backwards nest: this gradient came after the reduction
            if not (self.lie_in_grads and self.may_lie_in_grad(index)):
                self.add(index, param)
            return True
        if self._follows_window:
            self.hooked.add(index)
        held = self.sums.pop(index, None)
        if held is not None:
            if self.writers is not None:
                self.writers.wait(index)
                self.writers.use(held)
            param.grad = held if param.grad is None else held.add_(param.grad)
        return False

    def add(self, index: int, param: nn.Parameter) -> None:
        """Move ``param.grad``, if any, to the sum."""
        grad = read_plain(param)
        if grad is not None:
            self.put(index, grad.detach() if grad.requires_grad else grad)  # of a backward with `create_graph=True`
            write_plain(param, None)

    def put(self, index: int, grad: Tensor) -> None:
        """Add a gradient to the sum, which may keep its memory."""
        if self.writers is not None:
            self.writers.wait(index)
            self.writers.use(grad)
        held = self._sums.get(index)
        if held is None:
            self._sums[index] = grad.contiguous()
        else:
            if self.writers is not None:
                self.writers.use(held)  # another stream may have allocated it, and it may be dropped
            held.add_(grad)
        if self.writers is not None:
            self.writers.record(index)

    def settle(self) -> None:
        """Let the current stream read the sums, whichever streams have written them."""
        if self.writers is not None:
            self.writers.wait_for_all(self.sums.values())

    def reduced(self) -> None:
        """The current stream has reduced the sums; the next :meth:`settle` waits for it."""
        self.hooked.clear()
        self._follows_window = self._depth > 0
        if self.writers is not None:
            self.writers.clear()
            self.writers.record(PARTITION)

    def open_window(self, only: frozenset[int] | None = None) -> None:
        """Defer until :meth:`close_window`, all parameters or the given ones."""
        self._depth += 1
        self._follows_window = True
        if only is not None:
            self._only = only

    def close_window(self) -> None:
        """End the innermost :meth:`open_window`."""
        self._depth -= 1
        if self._depth == 0:
            self._only, self.reduces_next_backward = None, False

    @contextmanager
    def held(self) -> Iterator[None]:
        """:meth:`open_window` as a context."""
        self.open_window()
        try:
            yield
        finally:
            self.close_window()

    def discard(self) -> None:
        """Drop the sums. Open windows stay open."""
        self.sums.clear()
        self.hooked.clear()
        self._follows_window = self._depth > 0
        if self.writers is not None:
            self.writers.clear()


def within_budget(sizes: Sequence[int], bucket_size: int, budget: int) -> frozenset[int]:
    """Choose what to defer so that the collectives saved per byte are most.

    Without a window, parameters fill buckets in the order of backward, taken as the reverse of ``sizes``. Deferring
    all of a bucket saves its collective, so small buckets (in front of a parameter that did not fit) go first.

    Args:
        sizes: Bytes of each parameter's gradient, in the order of ``module.parameters()``; 0: not trainable.
        bucket_size: Bytes of a full bucket.
        budget: Bytes that may be deferred.

    Returns:
        Indices into ``sizes``; the same on every rank.
    """
    buckets: list[list[int]] = [[]]
    filled = 0
    for index in reversed(range(len(sizes))):
        if filled + sizes[index] > bucket_size and buckets[-1]:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    chosen: set[int] = set()
    for bucket in sorted(buckets, key=lambda members: sum(sizes[index] for index in members)):
        for index in bucket:
            if 0 < sizes[index] <= budget:
                chosen.add(index)
                budget -= sizes[index]
    return frozenset(chosen)
