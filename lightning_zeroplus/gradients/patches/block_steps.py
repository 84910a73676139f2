"""Step large tensors on the CPU block by block, each of which stays in the processor's cache.

A torch optimizer that is not fused reads and writes each tensor many times, once for each operation of its update. A
flat partition of millions of elements comes from memory each time. Its update is elementwise, so a block can be stepped
as a tensor of its own, with the same bits.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

#: Elements of a block: Adam's tensors for it have 1.5 MiB in fp32. It is a multiple of what a kernel takes at once, so
#: that the last elements of a block are computed like all others.
BLOCK = 2**16
#: A tensor of fewer blocks is nearly as fast as it is: a block costs the host about what a small parameter does.
_LEAST_BLOCKS = 8
_OPTIMIZERS: Any = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
#: Steps that are elementwise, and take several passes over a tensor. torch wraps them once more in some subclasses.
_ELEMENTWISE = {inspect.unwrap(optimizer.step) for optimizer in _OPTIMIZERS}
#: Settings of groups that are stepped in another way.
_OTHER_WAYS = ("fused", "foreach", "capturable", "differentiable")


class _Cut(NamedTuple):
    """A tensor that is stepped in blocks."""

    whole: Tensor
    blocks: list[Tensor]


@contextmanager
def in_blocks(optimizer: Optimizer) -> Iterator[None]:
    """Within a step of ``optimizer``: its groups have the blocks of large tensors, with their gradients and states.

    A tensor is cut only if it is on the CPU and has a state: the first step makes that whole.

    Args:
        optimizer: The optimizer. Others than torch's elementwise ones step as always.
    """
    if not _is_elementwise(optimizer) or type(optimizer.state) is not defaultdict:
        yield
        return
    kept = [(group, group["params"]) for group in optimizer.param_groups if not any(map(group.get, _OTHER_WAYS))]
    cuts: list[_Cut] = []
    for group, params in kept:
        if any(_can_be_cut(param, optimizer.state) for param in params):
            group["params"] = [block for param in params for block in _blocks(param, optimizer.state, cuts)]
    try:
        yield
    finally:
        for group, params in kept:
            group["params"] = params
        for whole, blocks in cuts:
            _take_over(optimizer.state[whole], [optimizer.state.pop(block) for block in blocks], whole)


@contextmanager
def every_step_in_blocks(optimizers: Iterable[Any]) -> Iterator[None]:
    """Within, each step of these optimizers is one :func:`in_blocks`, unless a hook would see it."""
    with ExitStack() as registered:
        for optimizer in optimizers:
            if isinstance(optimizer, Optimizer) and _is_elementwise(optimizer) and not _has_hooks(optimizer):
                running = registered.enter_context(ExitStack())

                def enter(own: Optimizer, args: Any, kwargs: Any, running: ExitStack = running) -> None:
                    running.enter_context(in_blocks(own))

                def leave(own: Optimizer, args: Any, kwargs: Any, running: ExitStack = running) -> None:
                    running.close()

                registered.callback(optimizer.register_step_pre_hook(enter).remove)
                registered.callback(optimizer.register_step_post_hook(leave).remove)
        yield


def _is_elementwise(optimizer: Optimizer) -> bool:
    for cls in type(optimizer).__mro__:
        if "step" in vars(cls) and not cls.__module__.startswith("lightning_zeroplus."):  # ours pass the call on
            return inspect.unwrap(vars(cls)["step"]) in _ELEMENTWISE
    return False


def _has_hooks(optimizer: Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


def _can_be_cut(param: Any, states: Mapping[Tensor, Any]) -> bool:
    if type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__ or param.numel() < _LEAST_BLOCKS * BLOCK:
        return False  # a DTensor is cut along its dimensions, and what is quantized in a way of its own
    grad = param.grad
    if grad is None or type(grad) is not Tensor or grad.layout != torch.strided or grad.dtype != param.dtype:
        return False
    own = [value for value in states.get(param, {}).values() if _is_alike(value, param)]
    tensors = [param, grad, *own]
    return bool(own) and all(each.device.type == "cpu" and each.is_contiguous() for each in tensors)


def _is_alike(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape


def _blocks(param: Tensor, states: dict[Tensor, Any], cuts: list[_Cut]) -> list[Tensor]:
    """The blocks of ``param`` with their gradients, whose states are put into ``states``; or ``param`` itself."""
    if not _can_be_cut(param, states):
        return [param]
    blocks = list(param.detach().view(-1).split(BLOCK))
    assert param.grad is not None
    for block, grad in zip(blocks, param.grad.detach().view(-1).split(BLOCK), strict=True):
        block.grad = grad
    own: list[dict[str, Any]] = [{} for _ in blocks]
    for key, value in states[param].items():
        if _is_alike(value, param):
            parts: Any = value.view(-1).split(BLOCK)
        elif isinstance(value, Tensor):  # such as the number of steps, which each block's step would count
            parts = [value, *(value.clone() for _ in blocks[1:])]
        else:
            parts = [value] * len(blocks)
        for state, part in zip(own, parts, strict=True):
            state[key] = part
    states.update(zip(blocks, own, strict=True))
    cuts.append(_Cut(param, blocks))
    return blocks


def _take_over(states: dict[str, Any], stepped: list[dict[str, Any]], param: Tensor) -> None:
    """Keep what the steps of the blocks have put in the place of a state; most of them write into it."""
    for key, value in stepped[0].items():
        before = states.get(key)
        if not isinstance(value, Tensor) or value.shape != (BLOCK,):
            states[key] = value
        elif not isinstance(before, Tensor) or value.data_ptr() != before.data_ptr():
            states[key] = torch.cat([state[key] for state in stepped]).view_as(param)
