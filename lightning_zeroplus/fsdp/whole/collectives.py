"""Collectives that the user calls with sharded weights or their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zeroplus.fsdp.whole import rules
from lightning_zeroplus.fsdp.whole.layout import gather, store


def communicate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of ``torch.distributed`` with whole tensors. If all ranks get the same, it goes to the shards.

    Raises:
        ValueError: If the ranks would get different tensors.
    """
    target = args[0] if args else next(iter(kwargs.values()))
    if func.__name__ in rules.GIVE_OTHERS and isinstance(target, DTensor):
        raise ValueError(
            f"`torch.distributed.{func.__name__}` would give each rank another tensor, but its target is sharded: the"
            " ranks hold parts of one tensor. Make it whole first, with `.full_tensor()`."
        )
    fulls: dict[int, Tensor] = {}

    def whole(tensor: DTensor) -> Tensor:
        return fulls.setdefault(id(tensor), gather(tensor))

    with torch.no_grad():
        result = func(*tree_map_only(DTensor, whole, args), **tree_map_only(DTensor, whole, kwargs))
    if func.__name__ in rules.GIVE_ALL_ALIKE:
        if result is not None:
            result.wait()  # `async_op=True`
        for tensor in tree_leaves(target):
            if isinstance(tensor, DTensor):
                link = getattr(tensor, "link", None)
                if link is not None:
                    link.before_write()
                store(fulls[id(tensor)], tensor)
    return result
