"""Stage 3 where ranks run different modules: the side of a gradient accumulation; see :mod:`.gradients.lockstep`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_zeroplus.engine.gathering.held import User
from lightning_zeroplus.engine.reduction.branches import _END, _FULL, _NESTED
from lightning_zeroplus.gradients.ranks.agreement import Fingerprint, Presence
from lightning_zeroplus.gradients.ranks.lockstep import End, Flush
from lightning_zeroplus.gradients.ranks.several import LockstepGroup
from lightning_zeroplus.gradients.tasks import current_task
from lightning_zeroplus.weights.gathered import is_any_gathered

if TYPE_CHECKING:
    from lightning_zeroplus.engine.gathering.gathers import Gathers
    from lightning_zeroplus.engine.reduction.local_sums import LocalSums


class KeepsLockstep:
    """The side of a gradient accumulation that keeps the ranks in step; in place of comparing buckets only."""

    local_sums: LocalSums
    averaged: set[int]
    _flushed: set[int]

    def _begin_lockstep(self: Any, gathers: Gathers) -> None:
        self._gathers = gathers
        self._early: list[Any] = []  # what others have reduced before this rank came to its backward
        self.lockstep = (self.engine.lockstep_group or LockstepGroup()).join(
            [name for name, _ in self.engine.module.named_parameters()],
            gather=gathers.together,
            contribute=self._take_part,
            rejoin=self._rejoin,
            is_free=self._is_free,
        )
        gathers.keep_step(self.lockstep, self._index_by_ds_id)
        for param in self.params:
            param.serve_others, param.read_whole = self.serve_others, self._read_whole
            if self.engine.compilation is None:
                param.gather_attribute = partial(gathers.fetch, (param,))

    def _is_free(self: Any) -> bool:
        return not self.engine.stepping and not is_any_gathered(self.params)

    def serve_others(self: Any) -> None:
        if current_task() == -1 and self._is_free():
            self.sync()

    def _read_whole(self: Any, params: Any) -> bool:
        """Gather weights for a user's code; whether that is possible now."""
        if self.engine.stepping or self.engine.compilation is not None:
            return False
        self._gathers.read(params)
        return True

    def end_reading(self: Any) -> None:
        self._gathers.end_reading()

    def _end_lockstep(self: Any) -> None:
        for param in self.params:
            for name in ("serve_others", "read_whole", "gather_attribute"):
                vars(param).pop(name, None)
        self.lockstep.leave()

    def _take_part(self: Any, flush: Flush) -> bool:
        if not flush.members:
            return False
        had_gradients = bool(self.in_buckets)
        if had_gradients:
            self.local_sums.diverged = True
            self._take_back()
        members = {index for index, _ in flush.members}
        with torch.no_grad():
            # The others are in their backward. This rank may zero or read its gradients before it begins its own.
            before = self._set_aside(index for index in members if self._has_partition(index))
            self._part_with(members)
            self._contribute_zeros(flush)
            self._early.append(self._set_aside(members))
            self._part_with(members)
            self._put_back(before, 1.0)
        return had_gradients

    def _join_early(self: Any) -> None:
        """The backward of this rank, too, has come to its end."""
        early, self._early = self._early, []
        with torch.no_grad():
            for kept in early:
                for piece, grad in kept:
                    self._slot(piece).add_(grad)

    def sync(self: Any, number: int = 0) -> bool:
        """Forwards have come to their end that no backward follows, on all ranks; see ``engine.meet``."""
        return self.lockstep.sync(number)

    def _rejoin(self: Any, alike: bool) -> None:
        """The ranks have come to the end of a backward: if they differed, reduce what they have not reduced together.

        Args:
            alike: Whether the ranks had done the same.
        """
        self._join_early()
        self.local_sums.diverged = False
        if not alike:
            self._gathers.forget_trace()
            if not self.local_sums.defers_all:
                self._reduce_deferred()
            self._share_whole()

    def _share_whole(self: Any) -> None:
        """What some rank still has whole, all have: each may write its copy next, and none gathers it after that."""

        def somewhere(indices: Any) -> set[int]:
            return Presence(range(len(self.params)), indices, torch.device("cpu"), self.engine.hosts).result()

        users = self._gathers.users()
        others = somewhere({index for index, each in users.items() if each != {User.READ}})
        read = somewhere(users.keys()) - others
        missing = somewhere((others | read) - users.keys())
        if missing:
            self._gathers.keep_together(sorted(missing), sorted(read), sorted(others))

    def reduce_if_needed(self: Any) -> None:
        """Average what the ranks have accumulated; one of them may still gather weights for more of it."""
        if self.life.is_waiting:
            self.sync()
        super().reduce_if_needed()  # type: ignore[misc]

    def flush_full(self: Any, dtype: torch.dtype | None, upstream: Callable[[], None]) -> None:
        """Reduce the bucket of ``dtype`` by ``upstream``, unless the ranks differ: then all buckets are empty now."""
        if self._flushes or self._may_flush(dtype, _FULL):
            upstream()

    def _may_flush(self: Any, dtype: torch.dtype | None, moment: int) -> bool:
        if not self.local_sums.diverged:
            flush = self._flush(dtype, moment)
            if self.lockstep.meet(flush) and not self.local_sums.diverged:
                self._emptied(flush)
                self.averaged.update(index for index, _ in flush.members)
                return True
            self.local_sums.diverged = True
        self._take_back()
        return False

    def begin_flush(self: Any, nested: bool = False) -> None:
        """All buckets are about to be reduced: at the end of a backward, or because a parameter is in one of them."""
        self._at_the_end: Flush | None = None
        if self.local_sums.defers_all:
            pass  # as under DDP's `no_sync`: the ranks need not do this equally often
        elif nested:
            self._may_flush(None, _NESTED)
        else:
            left = self._left_for_the_end()
            for number in left:
                self.filled.note(number)
            self._at_the_end = self._flush(None, _END)
            if not self.lockstep.begin_end(End(self._at_the_end, not left)):
                self.local_sums.diverged = True
                self._take_back()
        self._flushes = True

    def end_flush(self: Any, nested: bool = False) -> None:
        """Upstream has reduced all buckets."""
        self._flushes = False
        self._flushed.update(self.in_buckets)
        self.in_buckets.clear()
        if self._at_the_end is None:
            return
        self.filled = Fingerprint()
        if self.lockstep.end():
            self.averaged.update(index for index, _ in self._at_the_end.members)
        self._flushed.clear()
