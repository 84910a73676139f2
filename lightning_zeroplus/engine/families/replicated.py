"""Gradient accumulation if every rank keeps all gradients: stage 0 in fp32, and ``BF16_Optimizer`` (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.sparse_tensor import SparseTensor
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from lightning_zeroplus.engine.accumulation import GradientAccumulation
from lightning_zeroplus.engine.families.masters import Homes, take_over
from lightning_zeroplus.engine.families.norms import clip_coefficient
from lightning_zeroplus.engine.families.zeroes import RoutedZeroGrad
from lightning_zeroplus.engine.gathering.after_step import GathersWeights
from lightning_zeroplus.engine.optimizer.anew.edited import FollowsGroups
from lightning_zeroplus.engine.optimizer.groups import ShowsGroups
from lightning_zeroplus.engine.optimizer.kept import Kept
from lightning_zeroplus.engine.optimizer.shown_states import ShowsStates
from lightning_zeroplus.engine.reduction.wire_dtypes import sum_dtype_of
from lightning_zeroplus.gradients.ranks.agreement import sent_to
from lightning_zeroplus.gradients.shown import read_plain
from lightning_zeroplus.gradients.window_report import WindowReport

# The most elements that are flattened at a time: upstream's default in ``buffered_allreduce_fallback``.
_BUCKET_ELEMENTS = 500_000_000
# From how many elements on a copy into a bucket takes longer on the CPU than another collective: 1 MiB in fp32.
_ALONE = 2**18


class ReplicatedAccumulation(FollowsGroups, GradientAccumulation):
    """A plain torch optimizer: ``param.grad`` accumulates locally, and an all-reduce averages it.

    Reducing in every backward is correct, as under DDP: the part of ``param.grad`` that is averaged already is the same
    on all ranks, and averaging it again does not change it.
    """

    keeps_parts = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # The gradients of the last step, kept until the next backward: their norm is computed only on request, because
        # it costs 3 % of a small CPU step.
        self._last_grads: list[Tensor] = []
        self._begin_following()

    def _sums_in_grads(self) -> Mapping[int, nn.Parameter]:
        return {}

    def _optimized_params(self) -> Iterable[nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def before_backward(self) -> None:
        self.adopt_groups()
        super().before_backward()
        self._last_grads = []

    def before_step(self, part: int | None = None) -> bool:
        self.adopt_groups()
        return super().before_step(part)

    def zero_grad(self, set_to_none: bool = True, part: int | None = None) -> None:
        if not self.engine.stepping:
            self.adopt_groups()
        super().zero_grad(set_to_none, part)

    def grad_norm(self) -> float | Tensor | None:
        self._take_norm()
        return super().grad_norm()

    def _take_norm(self) -> Any:
        """The norm of the last step's gradients."""
        if self._last_grads:
            self.engine.note_global_grad_norm(torch.nn.utils.get_total_norm(self._last_grads))
            self._last_grads = []
        return self.engine.get_global_grad_norm()

    def _present_here(self) -> set[int]:
        """The parameters that have a gradient on this rank."""
        return {index for index, param in self.trained if read_plain(param) is not None}

    def reduce(self, members: frozenset[int]) -> None:
        here = self._present_here()
        shares = [float(index in here) for index, _ in self.trained]
        presence = sent_to(self.engine.device, shares, self._presence_dtype())
        self._all_reduce(members, presence)
        # No synchronization with the accelerator if this rank has a gradient for every member.
        if not here >= members:
            here = {index for (index, _), share in zip(self.trained, presence.tolist(), strict=True) if share > 0}
        self.averaged |= here
        if len(self.averaged) < len(self.trained):
            self._without_gradient(self.optimized - self.averaged)

    @torch.no_grad()
    def _all_reduce(self, members: frozenset[int], presence: Tensor) -> None:
        """Average ``presence``, and the gradients of parameters that are trainable, or were in their backward."""
        grads = []
        for index, param in self.trained:
            if not param.numel() or not (param.requires_grad or index in members):
                continue
            grad = read_plain(param)
            if grad is None:
                # Upstream would use zeros of the parameter's dtype, which autograd may not accept.
                grad = param.grad = torch.zeros_like(param, dtype=sum_dtype_of(param))
            grads.append(grad)
        is_kept = self.shown.kept is not None
        for bucket in _buckets([presence, *grads]):
            if bucket[0].is_sparse:
                self.engine.buffered_allreduce_fallback([SparseTensor(bucket[0])])
                continue
            flat = _flatten_dense_tensors(bucket)
            self.engine.buffered_allreduce_fallback([flat])
            for grad, averaged in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                if grad.is_contiguous() and not is_kept:
                    grad.data = averaged  # a copy would be one more pass over the model
                else:
                    grad.copy_(averaged)

    def _keep_zeros(self, indices: set[int]) -> None:
        super()._keep_zeros(indices)
        for index in indices:
            self.params[index].grad = torch.zeros_like(self.params[index], dtype=sum_dtype_of(self.params[index]))

    def _presence_dtype(self) -> torch.dtype:
        # The dtype of most gradients, so that it is reduced with them; the same on all ranks.
        dtypes = (sum_dtype_of(param) for _, param in self.trained)
        return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)

    def _without_gradient(self, indices: Iterable[int]) -> None:
        # The reduction has filled in zeros, with which the optimizer would step.
        for index in indices:
            self.params[index].grad = None

    def _part_read(self, index: int, read: Mapping[int, Tensor]) -> Tensor | None:
        return read.get(index)

    def _restore(self, kept: Mapping[int, Kept]) -> None:
        for index, there in kept.items():
            assert there is not None  # every rank has all
            param, grad = self.params[index], self._rescaled(there)
            param.grad = grad if grad.shape == param.shape else grad.view_as(param)

    def skip_missing_gradients(self) -> None:
        """Do nothing: a torch optimizer leaves parameters without ``grad`` alone."""

    def step_whole_tensors(self) -> None:
        """Do nothing: the optimizer has whole tensors."""

    def window_gradient(self, index: int) -> Tensor | None:
        return self.window_sum(index)

    def window_sum(self, index: int) -> Tensor | None:
        return read_plain(self.params[index])

    def set_local(self, index: int, value: Tensor | None) -> None:
        self.forget_synced((index,))
        param = self.params[index]
        scaled = None if value is None else value.detach() * self.engine.loss_scale_factor()
        param.grad = None if scaled is None else scaled.to(sum_dtype_of(param))

    def _whole(self) -> dict[int, Tensor]:
        return {index: grad for index, param in self.trained if (grad := read_plain(param)) is not None}

    def _keep(self, whole: Mapping[int, Tensor]) -> None:
        for index, param in self.trained:
            grad = whole.get(index)
            param.grad = None if grad is None else grad.to(sum_dtype_of(param))

    def _keep_some(self, whole: Mapping[int, Tensor]) -> None:
        for index, grad in whole.items():
            self.params[index].grad = grad.to(sum_dtype_of(self.params[index]))

    def _set_aside(self, indices: Iterable[int]) -> Any:
        return {index: self.params[index].grad for index in indices}

    def _put_back(self, kept: Any, factor: float) -> None:
        for index, grad in kept.items():
            self.params[index].grad = grad if factor == 1 else grad.mul_(factor)

    def _forget(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.params[index].grad = None

    def open_window(self, max_bytes: int | None) -> WindowReport:
        return super().open_window(None)  # a budget is pointless: every rank has the whole gradients in any case

    def held_bytes(self) -> int:
        if not self.life.is_waiting:
            return 0
        return sum(param.grad.nbytes for _, param in self.trained if param.grad is not None)

    def finalize(self) -> None:
        self.reduce_if_needed()
        self._clip()

    def total_norm(self) -> Tensor:
        return norm_of([param.grad for _, param in self.trained if param.grad is not None])

    def _stepped_grads(self) -> list[Tensor]:
        """The gradients that the optimizer is about to read."""
        grads = (read_plain(param) for group in self.optimizer.param_groups for param in group["params"])
        return [grad for grad in grads if grad is not None]

    def _clip(self) -> None:
        self._note_grads_read()
        self._last_grads = self._stepped_grads()
        if self.clip is None:
            self.engine.note_global_grad_norm(None)
        else:
            norm = self._take_norm()  # before clipping changes the gradients
            assert isinstance(norm, Tensor)
            self._clip_by(norm)

    def _note_grads_read(self) -> None:
        self.note_read(lambda: ((index, read_plain(param)) for index, param in self.trained))

    def _clip_by(self, norm: Tensor) -> None:
        """Clip the gradients, of this norm, as was asked for."""
        if self.clip is None:
            return
        self.clip_by_value(*self._stepped_grads())
        if self.clip.algorithm == "norm":
            params = [param for group in self.optimizer.param_groups for param in group["params"]]
            torch.nn.utils.clip_grads_with_norm_(params, self.clip.limit, norm)

    def clipping(self) -> AbstractContextManager[None]:
        return nullcontext()  # done in finalize(): a torch optimizer does not clip


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors that are reduced together: of one dtype and limited size.

    A sparse tensor is alone, and so is a large one on the CPU: it is reduced where it lies, not in a copy.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_sparse or (tensor.is_cpu and tensor.numel() >= _ALONE):
            yield [tensor]
        else:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype in sorted(by_dtype, key=str):
        bucket: list[Tensor] = []
        elements = 0
        for tensor in by_dtype[dtype]:
            bucket.append(tensor)
            elements += tensor.numel()
            if elements > _BUCKET_ELEMENTS:
                yield bucket
                bucket, elements = [], 0
        if bucket:
            yield bucket


def norm_of(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of all tensors together, in fp32; infinite or NaN if one of them is."""
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t, dtype=torch.float32) for t in tensors]))


class _BF16Overrides(RoutedZeroGrad, ShowsGroups, ShowsStates, GathersWeights):
    def get_grads_for_reduction(self: Any) -> tuple[list[Tensor], Any]:
        """The gradients to reduce, and the flags that say which parameters have one."""
        grads, experts = super().get_grads_for_reduction()  # type: ignore[misc]
        return [*grads, self.gradient_accumulation.presence], experts

    def get_grads_for_norm(self: Any, for_clipping: bool = False) -> Any:
        """Show a norm of one, where upstream would only skip a step that DDP does not skip."""
        if for_clipping or self.gradient_accumulation.engine.skips_steps():
            return super().get_grads_for_norm(for_clipping)  # type: ignore[misc]
        return [torch.ones(1, device=self.fp32_groups_gradients_flat[0].device)], {}


class BF16Accumulation(ReplicatedAccumulation):
    """``BF16_Optimizer``: every backward adds ``param.grad`` to a flat fp32 gradient, which is all-reduced."""

    mixin = _BF16Overrides
    has_users_groups = False

    def __init__(self, engine: Any, optimizer: Any, *args: Any) -> None:
        self._received: set[int] = set()
        self._norm: Tensor | None = None
        super().__init__(engine, optimizer, *args)
        names = {param: name for name, param in engine.module.named_parameters()}
        params = [param for group in optimizer.bf16_groups for param in group]
        self._homes = Homes(params, [names[param] for param in params])
        self._accumulated = {
            self.index[id(param)]: grad
            for group, grads in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
            for param, grad in zip(group, grads, strict=True)
        }

    def _optimized_params(self) -> Iterable[nn.Parameter]:
        return [param for group in self.optimizer.bf16_groups for param in group]

    def take_written_weights(self) -> None:
        self._homes.bring_back()
        optimizer = self.optimizer
        for rank, weights, master in zip(
            map(dist.get_rank, optimizer.real_dp_process_group),
            optimizer.bf16_partitioned_groups,
            optimizer.fp32_groups_flat_partition,
            strict=True,
        ):
            take_over(master, weights[rank])

    def follow_weights(self) -> None:
        self._homes.follow()

    skip_missing_gradients = GradientAccumulation.skip_missing_gradients

    step_whole_tensors = GradientAccumulation.step_whole_tensors

    def held_bytes(self) -> int:
        return sum(flat.nbytes for flat in self.optimizer.fp32_groups_gradients_flat) if self.life.is_waiting else 0

    def _present_here(self) -> set[int]:
        return self._received

    def _all_reduce(self, members: frozenset[int], presence: Tensor) -> None:
        self.presence = presence
        self.engine.buffered_allreduce_fallback()  # of what get_grads_for_reduction() gives

    def _presence_dtype(self) -> torch.dtype:
        return self.optimizer.fp32_groups_gradients_flat[0].dtype

    def _keep_zeros(self, indices: set[int]) -> None:
        GradientAccumulation._keep_zeros(self, indices)

    def _without_gradient(self, indices: Iterable[int]) -> None:
        """Do nothing: their part of the flat gradient is zero."""

    def window_sum(self, index: int) -> Tensor | None:
        return self._accumulated[index] if index in self._received else None

    def set_local(self, index: int, value: Tensor | None) -> None:
        self.forget_synced((index,))
        self._forget((index,))
        if value is not None:
            self._received.add(index)
            self._accumulated[index].copy_(value)

    def _whole(self) -> dict[int, Tensor]:
        return {index: self._accumulated[index] for index in sorted(self.averaged)}

    def _keep(self, whole: Mapping[int, Tensor]) -> None:
        for index, kept in self._accumulated.items():
            if index not in whole:
                kept.zero_()
            elif whole[index] is not kept:
                kept.copy_(whole[index])

    def _to_show(self) -> dict[int, Tensor]:
        return {index: grad.clone() for index, grad in self._whole().items()}

    def _keep_some(self, whole: Mapping[int, Tensor]) -> None:
        for index, grad in whole.items():
            self._accumulated[index].copy_(grad)

    def _set_aside(self, indices: Iterable[int]) -> Any:
        return {index: self._accumulated[index].clone() for index in indices}

    def _put_back(self, kept: Any, factor: float) -> None:
        for index, grad in kept.items():
            self._accumulated[index].copy_(grad)  # no loss scale in bf16

    def _forget(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._received.discard(index)
            if index in self._accumulated:
                self._accumulated[index].zero_()

    def discard(self) -> None:
        super().discard()
        self._received.clear()

    def end_backward(self) -> None:
        self._received |= {index for index, param in self.trained if read_plain(param) is not None}
        # Upstream clears the bf16 gradients only before a backward of the *engine's* forward output. A second backward
        # in the same training_step would add to them, and the fp32 sum would get the first gradient twice.
        self.optimizer.clear_lp_grads(set_to_none=True)
        super().end_backward()

    def total_norm(self) -> Tensor:
        return norm_of(self.optimizer.fp32_groups_gradients_flat)

    def _clip(self) -> None:
        grads = self.optimizer.fp32_groups_gradients_flat
        self._norm = norm_of(grads)
        self.clip_by_value(*grads)
        if self.clip is not None and self.clip.algorithm == "norm":
            torch._foreach_mul_(grads, clip_coefficient(self.clip.limit, self._norm))

    def unseen_norm(self) -> Tensor | None:
        return self._norm
