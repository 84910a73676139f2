"""Clipping of averaged gradients: in the next step, where they are shown, or where the ranks keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor, nn

from lightning_zeroplus.gradients.clip import Clip

#: This rank's part of a parameter's gradient, with the parameter's index.
Part = tuple[int, Tensor]


def norm_of_parts(parts: Iterable[Part], count: int, norm_type: float, group: Any, device: torch.device) -> Tensor:
    """The norm that ``torch.nn.utils.get_total_norm`` takes of whole gradients: that of the parameters' norms.

    Args:
        parts: This rank's. Each parameter is here once at most.
        count: The number of all parameters.
        norm_type: As for ``torch.linalg.vector_norm``.
        group: The ranks.
        device: Where the result is.

    Returns:
        A scalar in fp32, the same on all ranks; infinite or NaN if a gradient is.
    """
    nothing = torch.inf if norm_type < 0 else 0.0  # the norm of no elements
    mine = torch.full((count,), nothing, device=device)
    for index, part in parts:
        mine[index] = torch.linalg.vector_norm(part, norm_type, dtype=torch.float32)
    ranks = torch.empty(dist.get_world_size(group=group) * count, device=device)
    dist.all_gather_into_tensor(ranks, mine, group=group)
    return torch.linalg.vector_norm(torch.linalg.vector_norm(ranks.view(-1, count), norm_type, dim=0), norm_type)


def clip_by_norm(grads: Sequence[Tensor], limit: float, norm: Tensor) -> None:
    """Scale gradients in place that have this norm, as ``torch.nn.utils.clip_grads_with_norm_`` does."""
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.device))


class ClipsKept:
    """The part of a gradient accumulation that clips.

    Attributes:
        clip: What clips all gradients in the next step.
        clips: What clips those of one of several optimizers, by its number.
        norms_before_clipping: The norms of gradients that were clipped before the step, by number.
        unsynced: Whether the last backward was within ``no_sync()``.
        clipped_unsynced: Whether such gradients were clipped.
    """

    engine: Any
    optimizer: Any
    params: list[nn.Parameter]
    shown: Any
    members: Callable[[int | None], frozenset[int]]
    own_gradients: Callable[[int | None], Any]
    _process_group: Callable[[], Any]
    clip: Clip | None
    clips: dict[int, Clip]
    norms_before_clipping: dict[int | None, Tensor]
    unsynced: bool
    clipped_unsynced: bool
    _clips_unsynced: bool

    def forget_clips(self) -> None:
        """Forget what was asked for."""
        self.clip, self._clips_unsynced, self.clipped_unsynced = None, False, False
        self.clips.clear()
        self.norms_before_clipping.clear()

    def request_clip(self, clip: Clip, part: int | None, norm: Tensor | None) -> None:
        """Clip in the next step, or at once if the gradients are shown, or are clipped a second time.

        Args:
            clip: The clip.
            part: The number of one of several optimizers.
            norm: Clip at once by this norm, unscaled, which the step does not take.
        """
        self.clip_now(part)
        self.shown.before_clip()
        self.clipped_unsynced |= self.unsynced or self._clips_unsynced
        whole = self.shown.whole
        if norm is not None:
            self._clip_at_once(clip, part, norm)
        elif whole is not None:
            with torch.no_grad():
                self._clip_shown(clip, self._of_part(whole, part), part)
        elif part is None:
            self.clip = clip
        else:
            self.clips[part] = clip

    def clip_now(self, part: int | None) -> None:
        """Clip as was asked for before: another clip, and its norm, are of the clipped gradients, as under DDP."""
        if self._clip_of(part) is None:
            return
        own = self.own_gradients(part)  # may have clipped, with gradients of other optimizers
        clip = self._clip_of(part)
        if clip is None:
            return
        if part is None:
            self.clip = None
        else:
            del self.clips[part]
        self._clip_parts(clip, part, own)

    def clip_before_backward(self) -> None:
        """Clip all that was asked for: the gradients of another backward are added to the clipped ones, as under DDP.

        Raises:
            RuntimeError: If some of them come from a backward within ``no_sync()``. Under DDP each rank clips its own.
        """
        if self.clipped_unsynced:
            raise RuntimeError(
                "backward() after clip_gradients() of gradients from within no_sync(). Under DDP each rank has clipped"
                " its own; ZeRO has averaged them. Call clip_gradients() after the last backward of the step."
            )
        for part in list(self.clips) if self.clip is None else [None]:
            self.clip_now(part)
        self.norms_before_clipping.clear()  # the norm of the step is another

    def _clip_of(self, part: int | None) -> Clip | None:
        return self.clip if part is None else self.clips.get(part)

    @torch.no_grad()
    def norm_now(self, part: int | None, norm_type: float) -> Tensor:
        """A norm of the averaged, unscaled gradients as they are now.

        Args:
            part: Of the parameters of this one of several optimizers.
            norm_type: As for ``torch.nn.utils.clip_grad_norm_``.
        """
        own = self.own_gradients(part)
        return self._norm_of(own, part, norm_type) / (own.scale if norm_type else 1.0)

    def _norm_of(self, own: Any, part: int | None, norm_type: float) -> Tensor:
        members, device = self.members(part), self.engine.device
        parts = [each for each in own.parts if each[0] in members]
        if own.are_whole:
            return torch.nn.utils.get_total_norm([grad for _, grad in parts], norm_type).to(device)
        return norm_of_parts(parts, len(self.params), norm_type, self._process_group(), device)

    def _clip_at_once(self, clip: Clip, part: int | None, norm: Tensor) -> None:
        self._clip_parts(clip, part, self.own_gradients(part), norm)

    @torch.no_grad()
    def _clip_parts(self, clip: Clip, part: int | None, own: Any, norm: Tensor | None = None) -> None:
        """Clip where the gradients are, scaled as they are."""
        members = self.members(part)
        grads = [grad for index, grad in own.parts if index in members]
        if clip.algorithm == "value":
            Clip(clip.limit * own.scale, "value").clamp(*grads)
            return
        if norm is None:
            norm = self._norm_of(own, part, 2.0) / own.scale
            self.norms_before_clipping[part] = norm
        clip_by_norm(grads, clip.limit, norm)

    def _of_part(self, whole: dict[int, Tensor], part: int | None) -> dict[int, Tensor]:
        members = self.members(part)
        return {index: grad for index, grad in whole.items() if index in members}

    def _clip_shown(self, clip: Clip, whole: dict[int, Tensor], part: int | None) -> None:
        clip.clamp(*whole.values())
        if clip.algorithm == "norm" and whole:
            grads = [whole[index] for index in sorted(whole)]
            norm = torch.nn.utils.get_total_norm(grads)
            self.norms_before_clipping[part] = norm
            torch._foreach_mul_(grads, torch.clamp(clip.limit / (norm + 1e-6), max=1.0))

    def clipping(self) -> AbstractContextManager[None]:
        """Around ``optimizer.step()``: what clips by norm within it, where the next step does."""
        return nullcontext() if self.clip is None else self.clip.by_norm_in(self.optimizer)

    def clip_by_value(self, *grads: Tensor | None) -> None:
        """Clamp averaged, unscaled gradients in place if the next step clips by value."""
        if self.clip is not None:
            self.clip.clamp(*grads)


class ClipsGradients:
    """The part of an engine that clips."""

    gradient_accumulation: Any
    device: torch.device
    loss_scale_factor: Callable[[], float]
    _flag: Callable[[str], AbstractContextManager[None]]

    def clip_gradients(self, clip: Clip, part: int | None = None, norm: Tensor | None = None) -> None:
        """Clip the averaged gradient, of ``part`` of several optimizers: in the next ``step()``, or now by ``norm``."""
        assert self.gradient_accumulation is not None
        self.gradient_accumulation.request_clip(clip, part, norm)

    def total_norm(self, part: int | None = None, norm_type: float = 2.0) -> Tensor:
        """The global norm of the averaged, unscaled gradient as it is now; reduces what waits. L2: infinite for NaN.

        Args:
            part: Of the parameters of this one of several optimizers.
            norm_type: As for ``torch.nn.utils.clip_grad_norm_``.

        Raises:
            RuntimeError: As :meth:`step`, within ``no_sync()`` or a window or without ``zero_grad()``.
        """
        accumulation = self.gradient_accumulation
        assert accumulation is not None, "total_norm() needs an engine with an optimizer"
        accumulation.check_not_held()
        accumulation.clip_now(part)
        zero = torch.zeros((), device=self.device)
        if not accumulation.before_step(part):
            return zero
        if norm_type != 2.0:
            return accumulation.norm_now(part, norm_type)
        with accumulation.alone(part) as is_there, self._flag("stepping"):
            if not is_there:
                return zero
            accumulation.finalize()
            norm = accumulation.total_norm().to(self.device) / self.loss_scale_factor()
        # Upstream's norm of a gradient with NaN or infinity is -1.
        return torch.where((norm >= 0) & norm.isfinite(), norm, torch.inf)
