"""Gradient accumulation where every rank keeps all gradients: stage 0, and ``BF16_Optimizer`` (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor

from lightning_zeroplus.engine.accumulation import GradientAccumulation, RoutedZeroGrad
from lightning_zeroplus.engine.deferred import Deferred
from lightning_zeroplus.engine.grad_dtypes import sum_dtype_of


class ReplicatedAccumulation(GradientAccumulation):
    """A plain torch optimizer: ``param.grad`` accumulates locally, one all-reduce averages it.

    Reducing in every backward stays right, as under DDP: the part of ``param.grad`` that is averaged already is the
    same on all ranks, and averaging it again does not change it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # The gradients of the last step, kept until the next backward: their norm is taken only if it is asked for,
        # because it costs 3 % of a small CPU step.
        self._last_grads: list[Tensor] = []

    def before_backward(self) -> None:
        super().before_backward()
        self._last_grads = []

    def grad_norm(self) -> float | Tensor | None:
        if self._last_grads:
            self.engine._global_grad_norm = torch.nn.utils.get_total_norm(self._last_grads)
            self._last_grads = []
        return super().grad_norm()

    def reduce(self, members: frozenset[int]) -> None:
        self.engine.buffered_allreduce_fallback()

    def hold(self, max_bytes: int | None) -> Deferred:
        return super().hold(None)  # every rank has the whole gradient in any case

    def held_bytes(self) -> int:
        if not self.unreduced:
            return 0
        return sum(param.grad.nbytes for param in self.params if param.grad is not None)

    def finalize(self) -> None:
        self.reduce_if_needed()
        self._clip()

    def total_norm(self) -> Tensor:
        return _norm([param.grad for param in self.params if param.grad is not None])

    def _clip(self) -> None:
        grads = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._last_grads = grads
        if self.clip is None:
            self.engine._global_grad_norm = None
            return
        norm = self.grad_norm()  # before clipping changes the gradients
        self.clip_by_value(*grads)
        if self.clip.algorithm == "norm":
            assert isinstance(norm, Tensor)
            params = [param for group in self.optimizer.param_groups for param in group["params"]]
            torch.nn.utils.clip_grads_with_norm_(params, self.clip.limit, norm)

    def clipping(self) -> AbstractContextManager[None]:
        return nullcontext()  # done in finalize(): a torch optimizer does not clip


def _norm(tensors: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t, dtype=torch.float32) for t in tensors]))


class _MasterWeightOverrides(RoutedZeroGrad):
    def unscale_and_clip_grads(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Clip by value after upstream has unscaled."""
        result = super().unscale_and_clip_grads(*args, **kwargs)  # type: ignore[misc]
        self.gradient_accumulation.clip_by_value(*_master_grads(self))
        return result


def _master_grads(optimizer: Any) -> list[Tensor | None]:
    return [param.grad for group in optimizer.param_groups for param in group["params"]]


def with_masters(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters of ``FP16_Optimizer`` or ``FP16_UnfusedOptimizer``, each with its fp32 master weights."""
    for group, params in enumerate(optimizer.fp16_groups):
        if isinstance(optimizer, FP16_UnfusedOptimizer):
            yield from zip(params, optimizer.fp32_groups[group], strict=True)
        else:
            masters = optimizer.fp32_groups_flat[group].split([param.numel() for param in params])
            yield from ((param, master.view_as(param)) for param, master in zip(params, masters, strict=True))


class MasterWeightAccumulation(ReplicatedAccumulation):
    """Stage 0 in bf16 or fp16: ``FP16_Optimizer`` or ``FP16_UnfusedOptimizer`` around fp32 master weights."""

    mixin = _MasterWeightOverrides

    def __init__(self, engine: Any, optimizer: Any, *args: Any) -> None:
        super().__init__(engine, optimizer, *args)
        # Upstream lets the torch optimizer step once with zero gradients, to have its states allocated: that decays the
        # weights, and counts as a step in Adam's bias correction and in momentum.
        optimizer.optimizer.state.clear()
        with torch.no_grad():
            for param, master in with_masters(optimizer):
                master.copy_(param)

    def reduce(self, members: frozenset[int]) -> None:
        for index in members:
            param = self.params[index]
            if param.grad is None:
                # Upstream would fill in zeros of the parameter's dtype, which autograd may not expect.
                param.grad = torch.zeros_like(param, dtype=sum_dtype_of(param))
        super().reduce(members)

    def _clip(self) -> None:
        pass  # in the optimizer's own step

    clipping = GradientAccumulation.clipping


class BF16Accumulation(ReplicatedAccumulation):
    """``BF16_Optimizer``: every backward adds ``param.grad`` to a flat fp32 gradient, which is all-reduced."""

    def end_backward(self) -> None:
        # Upstream clears the bf16 gradients when the *engine's* forward output is differentiated. A second backward
        # in the same training_step would be added on top of them, and both again to the fp32 sum.
        self.optimizer.clear_lp_grads(set_to_none=True)
        super().end_backward()

    def total_norm(self) -> Tensor:
        return _norm(self.optimizer.fp32_groups_gradients_flat)

    def _clip(self) -> None:
        self.clip_by_value(*self.optimizer.fp32_groups_gradients_flat)

    clipping = GradientAccumulation.clipping
