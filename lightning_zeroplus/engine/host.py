"""What an accumulation, and all that it is made of, sees of its engine."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class EngineHost(Protocol):
    """The engine, as far as gradients need it.

    Attributes:
        module: The module that is trained.
        device: Where its parameters are.
        stepping: Whether ``step()`` runs.
        user_groups: The user's parameter groups, a :class:`~.optimizer.groups.UserGroups`; None without an optimizer.
        gradient_accumulation: The accumulation that has this host.
        meets_before_steps: A rank may run modules between its last backward and a step, which the others do not.
        lockstep_group: The models that keep step with this one on all ranks (stage 3); None: there is no other.
        has_configured_wire_dtype: The config names one dtype for all reductions.
        bucket_buffers: Physical buffers that take turns as reduction buckets.
    """

    module: nn.Module
    stepping: bool
    user_groups: Any
    gradient_accumulation: Any
    meets_before_steps: bool
    lockstep_group: Any
    has_configured_wire_dtype: bool
    bucket_buffers: int
    _global_grad_norm: Any
    _running_engine_backward: bool

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""

    def loss_scale_factor(self) -> float:
        """What a loss is multiplied with before its backward."""

    def get_global_grad_norm(self) -> Any:
        """The norm of the last step's gradient."""

    def buffered_allreduce_fallback(self, grads: list[Tensor] | None = None) -> None:
        """Average gradients over the ranks, in place."""

    def zero_reduce_bucket_size(self) -> int:
        """Elements of a reduction bucket."""

    def _backward_epilogue(self) -> None:
        """Reduce what hooks have put into buckets; a backward is over."""

    def step(self, lr_kwargs: dict[str, Any] | None = None, part: int | None = None) -> None:
        """Update the parameters, of one of several optimizers if ``part`` names it."""
