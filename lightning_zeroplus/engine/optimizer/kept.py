"""Gradients that a step has used, until they are zeroed: under DDP they are still there, and later ones are added.

Where gradients have partitions, a step reads them from fp32 tensors, unscaled and clipped. These are kept: the next
backward, the next step, or a read of ``param.grad`` makes them gradients again, and ``zero_grad()`` drops them. Keeping
them costs their memory, which loops that zero their gradients need for activations. So where gradients have partitions,
those of a parameter are kept until the first ``zero_grad()`` that drops them unused, and not any more after that. Where
every rank keeps all gradients, as under DDP, they are always kept, as under DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_zeroplus.engine.reduction.life import Event, Life
from lightning_zeroplus.engine.reduction.wire_dtypes import sum_dtype_of
from lightning_zeroplus.gradients.shown import ShownGradients

if TYPE_CHECKING:
    from lightning_zeroplus.engine.host import EngineHost
    from lightning_zeroplus.engine.reduction.exchange import Piece

#: This rank's part of a gradient, flat, and the loss scale that it has; None: this rank has no part of it.
Kept = tuple[Tensor, float] | None


class KeepsUsed:
    """The part of a gradient accumulation that keeps them.

    Attributes:
        used: The parameters of which the last step has used a gradient, until that is zeroed.
        kept: What is kept of these, by index of the parameter.
    """

    engine: EngineHost
    params: list[nn.Parameter]
    averaged: set[int]
    life: Life
    keeps_parts: bool
    shown: ShownGradients

    def _begin_keeping(self) -> None:
        self.used: set[int] = set()
        self.kept: dict[int, Kept] = {}
        self._restored: set[int] = set()  # kept, and gradients again, which no step or read has needed yet
        self._needed: set[int] = set()
        self._let_go: set[int] = set()  # the loop zeroes them: not kept any more
        self._read_by_step: dict[int, Tensor] = {}
        self._overflown: set[int] = set()  # what several optimizers use, and the step of one has found infinite

    def note_read(self, grads: Callable[[], Iterable[tuple[int, Tensor | None]]]) -> None:
        """Called in a step: the torch optimizer is about to read these gradients, unscaled and clipped.

        Args:
            grads: Returns them, each with a number by which :meth:`_part_read` finds it.
        """
        if not self.averaged <= self._released():
            self._read_by_step.update((number, grad) for number, grad in grads() if grad is not None)

    def keep_used(self) -> None:
        """After a step: keep what it has read."""
        read, self._read_by_step = self._read_by_step, {}
        self._need(self._restored & self.averaged)
        if not read:  # nothing to keep, or an overflow
            self._overflown |= self.averaged & self.shared()  # type: ignore[attr-defined]
            return
        scale = self.engine.loss_scale_factor()
        for index in self.averaged - self._released():
            part, dtype = self._part_read(index, read), sum_dtype_of(self.params[index])
            if part is None:
                self.kept[index] = None
            elif part.dtype == dtype:
                self.kept[index] = part, 1.0
            else:
                self.kept[index] = (part * scale).to(dtype), scale

    def has_overflown(self, members: Iterable[int]) -> bool:
        """Whether the step of another optimizer has found gradients of these parameters infinite, which are not zeroed.

        A step with them is skipped, too, as by torch's ``GradScaler``.
        """
        return not self._overflown.isdisjoint(members)

    def restore_used(self) -> None:
        """Make the kept gradients gradients of the next step."""
        if not self.kept:
            return
        kept, self.kept = self.kept, {}
        with torch.no_grad():
            self._restore(kept)
        self.used -= kept.keys()
        self.averaged |= kept.keys()
        self._restored |= kept.keys()
        self.life.goes_on(Event.SET)

    def reread(self, index: int) -> bool:
        """The gradient that the last step used is read or assigned: whether it is one again."""
        if index not in self.kept:
            return False
        self.restore_used()
        self._need(set(self._restored))
        return True

    def _released(self) -> set[int]:
        """What a step does not keep. Another optimizer may step with a gradient, however long the loop zeroes it."""
        if self.shown.kept is not None:
            return set()  # the user may have kept them, and zero them later, or not
        return self._let_go - self.shared()  # type: ignore[attr-defined]

    def _need(self, indices: set[int]) -> None:
        self._needed |= indices
        self._let_go -= indices
        self._restored -= indices

    def forget_used(self, members: Iterable[int]) -> None:
        """``zero_grad()``: drop what is kept of these parameters, and keep no more of them if nobody needed it."""
        dropped = (self.used | self._restored).intersection(members)
        if self.keeps_parts:
            self._let_go |= dropped - self._needed
        self._restored -= dropped
        self.used -= dropped
        self._overflown -= dropped
        for index in dropped & self.kept.keys():
            del self.kept[index]

    def cleared(self, index: int) -> None:
        """The same for a parameter whose gradient was set to None by hand."""
        self.forget_used((index,))

    def _rescaled(self, kept: tuple[Tensor, float]) -> Tensor:
        """A kept part, as the next step expects it."""
        part, scale = kept
        factor = self.engine.loss_scale_factor() / scale
        return part if factor == 1 else part * factor

    # -- what families do differently ---------------------------------------------------------------------------------

    def _part_read(self, index: int, read: Mapping[int, Tensor]) -> Tensor | None:
        """This rank's part of a parameter's gradient in what :meth:`note_read` was given; flat."""
        raise NotImplementedError

    def _restore(self, kept: Mapping[int, Kept]) -> None:
        """Put kept gradients to where the next step finds them."""
        own: Iterable[Piece] = self._own(kept)  # type: ignore[attr-defined]
        for piece in own:
            there = kept[piece.param]
            if there is not None:
                slot: Any = self._slot(piece)  # type: ignore[attr-defined]
                slot.copy_(self._rescaled(there).view(-1).narrow(0, 0, piece.numel))
