"""Stage 0 in 16 bits: bf16 or fp16 weights around fp32 master weights, and fp32 weights with a loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor, nn

from lightning_zeroplus.engine.accumulation import GradientAccumulation
from lightning_zeroplus.engine.families.masters import take_over, with_master_gradients, with_masters
from lightning_zeroplus.engine.families.norms import clip_coefficient
from lightning_zeroplus.engine.families.replicated import ReplicatedAccumulation
from lightning_zeroplus.engine.families.zeroes import RoutedZeroGrad
from lightning_zeroplus.engine.optimizer.groups import ShowsGroups
from lightning_zeroplus.engine.optimizer.shown_states import ShowsStates
from lightning_zeroplus.engine.scaling import UpdatesScaleLate


class _MasterWeightOverrides(RoutedZeroGrad, UpdatesScaleLate, ShowsGroups, ShowsStates):
    def _step_within(self: Any, closure: Any) -> Any:
        """Upstream's step, but read the gradients once, and skip it only where the loss scale falls, as DDP does.

        Upstream asks for each gradient whether it is finite, and lets the host wait for every answer.
        """
        skips = self.gradient_accumulation.engine.skips_steps()
        if not _is_unfused(self) or closure is not None:
            return super()._step_within(closure)
        pairs = list(with_masters(self))
        norm = _norm(param.grad for param, _ in pairs if param.grad is not None)
        if skips:
            norm = norm.cpu()
            if not norm.isfinite():
                return super()._step_within(None)  # skips it, and lowers the scale
        for param, master in pairs:
            master.grad = torch.zeros_like(master) if param.grad is None else param.grad.to(master.dtype)
        self.overflow, self._global_grad_norm = False, norm
        self._update_scale(False)
        self.unscale_and_clip_grads(norm)
        self.optimizer.step()
        for _, master in pairs:
            master.grad = None
        torch._foreach_copy_([param.data for param, _ in pairs], [master.data for _, master in pairs])
        return False

    def unscale_and_clip_grads(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Clip by value after upstream has unscaled."""
        accumulation, result = self.gradient_accumulation, None
        if accumulation.engine.skips_steps() or not _is_unfused(self):
            result = super().unscale_and_clip_grads(*args, **kwargs)  # type: ignore[misc]
        elif self.clip_grad > 0:
            torch._foreach_mul_(
                [grad for grad in _master_grads(self) if grad is not None], clip_coefficient(self.clip_grad, args[0])
            )
        accumulation.clip_by_value(*_master_grads(self))
        accumulation.note_read(
            lambda: ((accumulation.index[id(param)], grad) for param, grad in with_master_gradients(self))
        )
        return result


def _is_unfused(optimizer: Any) -> bool:
    return isinstance(optimizer, FP16_UnfusedOptimizer) and not optimizer.fused_lamb_legacy


def _norm(grads: Iterable[Tensor]) -> Tensor:
    """In fp32; the host does not wait for it, but for the indices of sparse gradients."""
    values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    return torch.stack(torch._foreach_norm(values, 2, torch.float32)).norm() if values else torch.zeros(())


def _master_grads(optimizer: Any) -> list[Tensor | None]:
    return [param.grad for group in optimizer.param_groups for param in group["params"]]


class MasterWeightAccumulation(ReplicatedAccumulation):
    """Stage 0 in bf16 or fp16: ``FP16_Optimizer`` or ``FP16_UnfusedOptimizer`` around fp32 master weights."""

    mixin = _MasterWeightOverrides
    has_users_groups = False

    def __init__(self, engine: Any, optimizer: Any, *args: Any) -> None:
        super().__init__(engine, optimizer, *args)
        # Upstream lets the torch optimizer step once with zero gradients, to allocate its states. That decays the
        # weights, and counts as a step in Adam's bias correction and in momentum.
        optimizer.optimizer.state.clear()
        with torch.no_grad():
            for param, master in with_masters(optimizer):
                master.copy_(param)

    def _optimized_params(self) -> Iterable[nn.Parameter]:
        return [param for group in self.optimizer.fp16_groups for param in group]

    def take_written_weights(self) -> None:
        for param, master in with_masters(self.optimizer):
            take_over(master, param)

    skip_missing_gradients = GradientAccumulation.skip_missing_gradients

    def _clip(self) -> None:
        pass  # the optimizer clips in its own step

    clipping = GradientAccumulation.clipping


class _ScaledOverrides(RoutedZeroGrad):
    gradient_accumulation: ScaledAccumulation

    @property
    def overflow(self) -> bool:
        """Whether the last step was left out: upstream counts these steps."""
        return self.gradient_accumulation.overflow


class ScaledAccumulation(ReplicatedAccumulation):
    """Stage 0 with fp32 weights and a loss scale: as under torch's ``GradScaler``.

    The gradients have the scale until the optimizer steps.

    Attributes:
        overflow: Whether the last step was left out, because its gradients were not finite.
    """

    mixin = _ScaledOverrides
    overflow = False

    def _clip(self) -> None:
        pass  # the gradients have their scale until the step

    @contextmanager
    def clipping(self) -> Iterator[None]:
        """Unscale and clip before the step, leave it out after an overflow, and change the scale after it."""
        self.overflow = not self._unscale()
        with _without_steps(self.optimizer) if self.overflow else nullcontext():
            yield
        self.engine.loss_scaler.update_scale(self.overflow)

    def _unscale(self) -> bool:
        """Whether the averaged gradients are finite, which lose their scale, and are clipped then."""
        grads = self._stepped_grads()
        if grads:
            torch._foreach_mul_(grads, 1.0 / self.engine.loss_scale_factor())
        norm = torch.nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in grads])
        self.engine.note_global_grad_norm(norm)
        if not norm.isfinite():
            return False
        self._note_grads_read()
        self._clip_by(norm)
        return True


@contextmanager
def _without_steps(optimizer: Any) -> Iterator[None]:
    """Within, the optimizer's ``step()`` does nothing. A scheduler may have put its own in the place of the class's."""
    own = vars(optimizer).get("step")
    optimizer.step = lambda *_, **__: None
    try:
        yield
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own
