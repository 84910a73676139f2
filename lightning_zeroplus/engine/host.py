"""The part of an engine that a gradient accumulation and its components see."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class EngineHost(Protocol):
    """The engine, as far as gradients need it.

    Attributes:
        module: The module that is trained.
        stepping: Whether ``step()`` runs.
        updating: Whether upstream's part of ``step()`` runs.
        user_groups: The user's parameter groups, a :class:`~.optimizer.groups.UserGroups`; None without an optimizer.
        gradient_accumulation: The accumulation of this engine.
        meets_before_steps: Between its last backward and a step, a rank may run modules that other ranks do not run.
        lockstep_group: The models that keep step with this one on all ranks (stage 3); None: there is no other.
        hosts: The process group in which the hosts of the ranks agree; None: the group of all.
        has_configured_wire_dtype: The config names one dtype for all reductions.
        loss_scaler: The loss scale of fp32 weights; None: there is none, or upstream's optimizer has it.
        bucket_buffers: Number of physical buffers that take turns as reduction buckets.
    """

    module: nn.Module
    stepping: bool
    updating: bool
    user_groups: Any
    gradient_accumulation: Any
    meets_before_steps: bool
    lockstep_group: Any
    hosts: Any
    has_configured_wire_dtype: bool
    loss_scaler: Any
    bucket_buffers: int
    _running_engine_backward: bool

    @property
    def device(self) -> torch.device:
        """The device of this rank."""

    def loss_scale_factor(self) -> float:
        """The factor by which a loss is scaled before its backward; 1 without fp16."""

    def skips_steps(self) -> bool:
        """Whether a step whose gradient is not finite is skipped."""

    def get_global_grad_norm(self) -> Any:
        """The global L2 norm of the last step's gradient."""

    def note_global_grad_norm(self, norm: Any) -> None:
        """What :meth:`get_global_grad_norm` returns from now on."""

    def buffered_allreduce_fallback(self, grads: list[Tensor] | None = None) -> None:
        """Average gradients over the ranks, in place."""

    def zero_reduce_bucket_size(self) -> int:
        """Size of a reduction bucket, in elements."""

    def _backward_epilogue(self) -> None:
        """End a backward: reduce what hooks have put into buckets."""

    def rebuild(self, new_group: dict[str, Any] | None = None, part: int = 0) -> None:
        """Make new partitions for parameters that became trainable, or for a new group of an optimizer."""

    def adopt_edited_groups(self) -> None:
        """Take over what the user has done to the lists that he got from an optimizer."""

    def step(self, lr_kwargs: dict[str, Any] | None = None, part: int | None = None) -> None:
        """Update the parameters, of all optimizers or of the one with number ``part``."""
