"""Norms and clipping of averaged gradients where the ranks keep them, before any step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

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
