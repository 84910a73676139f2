"""Ranks that take different branches of a model, and so fill their reduction buckets differently.

Upstream's hooks (stages 2 and 3) fill buckets in the order in which gradients come, and a full one is averaged with
whatever the other ranks have in theirs. Here the ranks compare what they are about to reduce. Where it differs, every
rank takes its gradients back from the buckets, defers those that are still to come, and reduces them at the end of the
backward, parameter by parameter; a missing one counts as zero, as under DDP with ``find_unused_parameters``.

To wait for a comparison before each reduction would cost a step of a small model 8 % of its time (two CPU ranks). A
backward that has come often enough after the one before it is therefore expected to come again, and is reduced while
the comparison runs. A rank that has something else contributes zeros to what the others expect of it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from lightning_zeroplus.engine.reduction.life import Event, Life
from lightning_zeroplus.engine.reduction.streams import streams_matter
from lightning_zeroplus.gradients.ranks.agreement import Comparison, Fingerprint, Presence
from lightning_zeroplus.gradients.ranks.foresight import Foresight
from lightning_zeroplus.gradients.ranks.lockstep import Flush
from lightning_zeroplus.gradients.shown import read_plain

if TYPE_CHECKING:
    from lightning_zeroplus.engine.host import EngineHost
    from lightning_zeroplus.engine.reduction.local_sums import LocalSums

# The moments at which buckets are reduced, as numbers that no parameter has.
_FULL, _NESTED, _END = -1, -2, -3


class ComparesBuckets:
    """The side of a gradient accumulation that upstream's buckets are compared by.

    Attributes:
        filled: What this rank has put into buckets in this backward.
        in_buckets: The dtypes of the gradients that wait in buckets, by index of the parameter.
    """

    engine: EngineHost
    optimizer: Any
    params: list[nn.Parameter]
    index: dict[int, int]
    optimized: frozenset[int]
    local_sums: LocalSums
    averaged: set[int]
    life: Life
    hooks_reduce: bool

    def _begin_comparing(self) -> None:
        self.filled = Fingerprint()
        self.in_buckets: dict[int, torch.dtype] = {}
        self._foresight = Foresight()
        self._flushed: set[int] = set()  # in this backward
        self._flushes = False
        self._open: tuple[Flush, Flush | None, Comparison] | None = None

    def present_somewhere(self, members: Iterable[int], here: Container[int]) -> Presence:
        """Begin to ask which of these parameters have a gradient on some rank."""
        return Presence(members, here, torch.device("cpu"), self.engine.hosts)

    def sync(self, number: int = 0) -> bool:
        """Forwards have come to their end that no backward follows, on all ranks; see ``engine.meet``."""
        return False

    def serve_others(self) -> None:
        """All ranks are about to meet: take part in gathers of one that still runs modules by itself (stage 3)."""

    @contextmanager
    def filling(self, param: nn.Parameter) -> Iterator[None]:
        """Around upstream's hook, which puts the gradient into a bucket, and may reduce a full one before."""
        self.begin_filling(param)
        yield
        self.end_filling()

    def begin_filling(self, param: nn.Parameter) -> None:
        """Upstream's hook is about to put the gradient into a bucket."""
        grad = read_plain(param)
        assert grad is not None
        self.in_buckets[self.index[id(param)]] = grad.dtype

    def end_filling(self) -> None:
        """It has."""
        if self.local_sums.diverged:
            self._take_back()  # the ranks have parted, and nothing reduces this bucket

    def flush_full(self, dtype: torch.dtype | None, upstream: Callable[[], None]) -> None:
        """Reduce the bucket of ``dtype`` by ``upstream``, unless the ranks differ: then all buckets are empty now."""
        if self._flushes:
            upstream()  # all buckets, or zeros that others expect
        elif self.local_sums.diverged:
            self._take_back()
        else:
            if self._compare(dtype, _FULL):
                upstream()
            if not self._settle():
                self._take_back()

    def begin_flush(self, nested: bool = False) -> None:
        """All buckets are about to be reduced: at the end of a backward, or because a parameter is in one of them."""
        if self.hooks_reduce and not self.local_sums.defers_all:
            if self.local_sums.diverged or not self._compare(None, _NESTED if nested else _END):
                self._settle()
                self._take_back()
        self._flushes = True

    def end_flush(self, nested: bool = False) -> None:
        """Upstream has reduced all buckets."""
        self._flushes = False
        self._settle()
        self._flushed.update(self.in_buckets)  # what came at the end
        self.in_buckets.clear()
        if not nested:
            self._end()

    def _end(self) -> None:
        """Reduce what was deferred since the ranks parted, on all ranks; not what an open window holds."""
        self.filled = Fingerprint()
        if not self.local_sums.diverged:
            self._flushed.clear()
            self._foresight.end()
            return
        self.local_sums.diverged = False
        self._foresight.forget()
        self._reduce_deferred()

    def _reduce_deferred(self) -> None:
        """Reduce what this rank has not put into buckets that all have reduced; what a window holds stays."""
        local_sums = self.local_sums
        local_sums.settle()
        flushed, self._flushed = self._flushed, set()
        held = frozenset() if local_sums.only is None or local_sums.reduces_next_backward else local_sums.only
        candidates = self.optimized - held
        here = candidates & (local_sums.sums.keys() | flushed)
        present = self.present_somewhere(candidates, here).result()
        self.reduce(frozenset(present))
        self.averaged |= present  # some are averaged already
        local_sums.hooked.clear()  # they differ as the ranks do
        if not held:
            self.life.goes_on(Event.REDUCED)
            local_sums.reduced()

    def reduce(self, members: frozenset[int]) -> None:
        raise NotImplementedError

    def _compare(self, dtype: torch.dtype | None, moment: int) -> bool:
        """Begin to compare what is about to be reduced.

        Returns:
            Whether it may be reduced. If not, that is because the ranks differ, or because something else was expected
            on all of them, to which this one has contributed zeros.
        """
        flush, expected = self._flush(dtype, moment), self._foresight.next()
        self._open = flush, expected, Comparison([flush.fingerprint], torch.device("cpu"), self.engine.hosts)
        if expected is None:
            return self._settle()
        if flush == expected:
            return True
        self._take_back()
        self._contribute_zeros(expected)
        return False

    def _flush(self, dtype: torch.dtype | None, moment: int) -> Flush:
        """What would be reduced now."""
        self.filled.note(moment)
        indices = self.in_buckets if dtype is None else [self.index[id(param)] for param in self._in_bucket(dtype)]
        return Flush(self.filled.value, dtype, tuple((index, self.in_buckets[index]) for index in indices))

    def _settle(self) -> bool:
        """Wait for the comparison that runs, if any: whether the ranks agree."""
        if self._open is None:
            return not self.local_sums.diverged
        (flush, expected, comparison), self._open = self._open, None
        (is_same,) = comparison.result()
        if is_same and expected in (None, flush):
            self._foresight.passed(flush)
        else:
            self.local_sums.diverged = True
        if flush == expected or not self.local_sums.diverged:
            self._emptied(flush)
        if not self.local_sums.diverged:
            self.averaged.update(index for index, _ in flush.members)
        return not self.local_sums.diverged

    def _emptied(self, flush: Flush) -> None:
        """Upstream has reduced it, or is about to."""
        for index, _ in flush.members:
            del self.in_buckets[index]
            self._flushed.add(index)

    def _take_back(self) -> None:
        for index, grad in self._emptied_buckets():
            self.local_sums.put(index, grad.clone())
        self.life.goes_on(Event.TAKEN_BACK, self.in_buckets)
        self.in_buckets.clear()

    def _contribute_zeros(self, flush: Flush) -> None:
        """Do what all other ranks do, with gradients of zero."""
        params: list[Any] = [self.params[index] for index, _ in flush.members]
        # One of them may be about to be put into a bucket.
        kept = [(param.grad, getattr(param, "grad_accum", None)) for param in params]
        self._flushes = True
        try:
            for param, (index, dtype) in zip(params, flush.members, strict=True):
                param.grad = param.grad_accum = None
                self._fill_with_zeros(index, dtype)
            self.reduce_buckets(flush.dtype)
            if streams_matter():
                get_accelerator().synchronize()  # the partitions are read next, by other streams, or by the host
        finally:
            self._flushes = False
        for param, (grad, grad_accum) in zip(params, kept, strict=True):
            param.grad, param.grad_accum = grad, grad_accum
            self.optimizer.params_already_reduced[self.optimizer.get_param_id(param)] = False

    # -- what stages do differently ------------------------------------------------------------------------------------

    def _in_bucket(self, dtype: torch.dtype) -> Iterable[nn.Parameter]:
        """The parameters whose gradients are in one bucket, in order."""
        raise NotImplementedError

    def _emptied_buckets(self) -> Iterator[tuple[int, Tensor]]:
        """Take the gradients out of the buckets; their memory is used again."""
        raise NotImplementedError

    def _fill_with_zeros(self, index: int, dtype: torch.dtype) -> None:
        """Put a gradient of zero into a bucket."""
        raise NotImplementedError

    def reduce_buckets(self, dtype: torch.dtype | None = None) -> None:
        """Reduce one bucket, or all."""
        raise NotImplementedError

    def _begin_anew(self) -> None:
        if self._open is not None:
            self._open = None  # after an exception
            self._foresight.forget()
        self.filled = Fingerprint()
        self.in_buckets.clear()
        self._flushed.clear()
        self._flushes = self.local_sums.diverged = False
