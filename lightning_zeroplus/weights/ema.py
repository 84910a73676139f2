"""``zp.ema_update``: an exponential moving average of weights, without gathering them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_zeroplus.weights.gathered import gathered
from lightning_zeroplus.weights.partitioned.partition import is_whole, master_follows, own_slice, settle


@torch.no_grad()
def ema_update(teacher: nn.Module, student: nn.Module, decay: float, *, buffers: Literal["copy"] | None = None) -> None:
    """``teacher = decay * teacher + (1 - decay) * student``, parameter by parameter.

    The result is the same, to the bit, as ``t.data.mul_(decay).add_(s.data, alpha=1 - decay)`` for each pair under DDP.
    It is computed in the parameters' dtype: in bf16 and fp16, a ``decay`` very close to 1 may change nothing, because
    the change is rounded away. At ZeRO stage 3 and under FSDP2 every rank updates its own partition; at stage 3 the
    student is gathered only where the teacher is in use. Works under every strategy and in a plain process, before,
    during and after a fit.

    Args:
        teacher: The module that is updated in place; usually with ``requires_grad_(False)``.
        student: A module with the same parameters.
        decay: From 0, which copies the student, to 1.
        buffers: ``"copy"`` copies the student's buffers. None leaves the teacher's buffers alone.

    Raises:
        ValueError: If an argument is something else, or the modules differ; names the first parameter that differs.
            Nothing was changed.
    """
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
        raise ValueError(f"zp.ema_update(decay={decay!r}): give a number from 0 to 1.")
    if buffers not in (None, "copy"):
        raise ValueError(f'zp.ema_update(buffers={buffers!r}): give "copy" or None.')
    for module in (teacher, student):
        if not isinstance(module, nn.Module):
            raise ValueError(f"zp.ema_update() takes two modules, not {type(module).__name__}.")
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # one of them may still be unsharded from its forward
    pairs = _pairs(dict(teacher.named_parameters()), dict(student.named_parameters()), "parameter")
    copied = _pairs(dict(teacher.named_buffers()), dict(student.named_buffers()), "buffer") if buffers else []
    for target, source in pairs:
        _update(target, source, decay)
    for target, source in copied:
        target.copy_(source)


def _pairs(teacher: dict[str, Any], student: dict[str, Any], kind: str) -> list[tuple[Any, Any]]:
    for name in [*teacher, *student]:
        if name not in teacher or name not in student:
            missing = "teacher" if name in student else "student"
            raise ValueError(f"zp.ema_update(): the {missing} has no {kind} {name!r}.")
        if _kind(teacher[name]) != _kind(student[name]):
            raise ValueError(
                f"zp.ema_update(): the {kind} {name!r} is {_describe(teacher[name])} in the teacher and"
                f" {_describe(student[name])} in the student."
            )
    return [(target, student[name]) for name, target in teacher.items()]


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _kind(tensor: Any) -> tuple[Any, ...]:
    return _shape(tensor), tensor.dtype, hasattr(tensor, "ds_id"), str(getattr(tensor, "placements", None))


def _describe(tensor: Any) -> str:
    how = "partitioned by stage 3, " if hasattr(tensor, "ds_id") else ""
    how += f"sharded {tensor.placements}, " if hasattr(tensor, "placements") else ""
    return f"{how}of shape {_shape(tensor)} and {tensor.dtype}"


def _update(target: Any, source: Any, decay: float) -> None:
    if not hasattr(target, "ds_id"):
        _step(_local(target), _local(source), decay)
        return
    settle(target)
    if not is_whole(target):
        mine, _ = own_slice(target, None)
        if is_whole(source):
            _step(mine, own_slice(source, source.data)[1], decay)
        else:
            _step(mine, own_slice(source, None)[0], decay)
    else:
        with nullcontext() if is_whole(source) else gathered([source]):  # the teacher is in use, the student is not
            _step(target.data, source.data, decay)
        mine, values = own_slice(target, target.data)
        mine.copy_(values)
    master_follows(target)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.data
    return local


def _step(target: Tensor, source: Tensor, decay: float) -> None:
    target.mul_(decay).add_(source.to(target.device), alpha=1 - decay)
