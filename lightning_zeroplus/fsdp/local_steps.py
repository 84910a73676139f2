"""Elementwise optimizers step this rank's shards as ordinary tensors.

The numbers are those of a step of the DTensors. But DTensor dispatches each operation in Python, which takes several
times as long as the arithmetic of a shard that is not large.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_zeroplus.fsdp.whole.layout import shard_like


@contextmanager
def on_shards(optimizer: Optimizer) -> Iterator[None]:
    """Within the step of an elementwise optimizer: its parameters, gradients and states are those of this rank.

    Nothing changes where a hook of the user would see that, or where a tensor is laid out in another way.

    Args:
        optimizer: The optimizer. Its step has begun; our hooks are among its hooks.
    """
    if not _sees_nobody(optimizer) or not _is_plain(optimizer):
        yield
        return
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    states, shards = optimizer.state, _Shards()
    optimizer.state = defaultdict(dict)
    for group, params in groups:
        group["params"] = [shards.of(param) for param in params]
        for shard, param in zip(group["params"], params, strict=True):
            if param in states:
                optimizer.state[shard] = {key: _local(value) for key, value in states[param].items()}
    try:
        yield
    finally:
        stepped, optimizer.state = optimizer.state, states
        for group, params in groups:
            for shard, param in zip(group["params"], params, strict=True):
                if shard in stepped:
                    _take_over(states[param], stepped[shard], param)
            group["params"] = params
        torch.autograd.graph.increment_version(shards.params)


class _Shards:
    """The shards of parameters.

    Attributes:
        params: The parameters that have one.
    """

    def __init__(self) -> None:
        self.params: list[Tensor] = []

    def of(self, param: Tensor) -> Tensor:
        """This rank's shard of ``param``, with its gradient; an ordinary parameter as it is."""
        if not isinstance(param, DTensor):
            return param
        self.params.append(param)
        shard = param._local_tensor.detach()
        grad: Any = param.grad
        if grad is not None:
            shard.grad = grad._local_tensor
        return shard


def _sees_nobody(optimizer: Optimizer) -> bool:
    """Whether no hook but ours runs during the step."""
    ours = 1
    return (
        len(optimizer._optimizer_step_pre_hooks) <= ours
        and len(optimizer._optimizer_step_post_hooks) <= ours
        and not torch_optimizer._global_optimizer_pre_hooks
        and not torch_optimizer._global_optimizer_post_hooks
    )


def _is_plain(optimizer: Optimizer) -> bool:
    """Whether all gradients and states are cut as their parameters are."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not isinstance(param, DTensor):
                continue
            grad = param.grad
            if not param.dim() or (grad is not None and (not _alike(grad, param) or grad.dtype != param.dtype)):
                return False
            states = optimizer.state.get(param, {}).values()
            if not all(_alike(value, param) for value in states if isinstance(value, DTensor)):
                return False
    return True


def _alike(tensor: Any, param: DTensor) -> bool:
    return isinstance(tensor, DTensor) and tensor._spec.placements == param._spec.placements


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _take_over(states: dict[str, Any], stepped: dict[str, Any], param: Tensor) -> None:
    """Replace the states of ``param`` by those after the step."""
    for key in states.keys() - stepped.keys():
        del states[key]
    for key, value in stepped.items():
        if value is not _local(states.get(key, stepped)):
            states[key] = _as_state(key, value, param)


def _as_state(key: str, value: Any, param: Tensor) -> Any:
    """A state that the step has made: with one element for each element of a shard it is sharded, too."""
    if not isinstance(param, DTensor) or not isinstance(value, Tensor) or key == "step":
        return value
    if value.shape != param._local_tensor.shape:
        return value
    return shard_like(param, value)
