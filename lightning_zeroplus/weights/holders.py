"""Who has the memory of a weight, besides the weight: ``p.data``, ``p.detach()``, ``state_dict()`` or a view was kept.

Under DDP such a tensor follows its weight through every step, and what is written to it is written to the weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

#: An attribute of a weight that was left partitioned: the memory that it had, and that others hold.
_MEMORY = "_zeroplus_memory"


def leave(param: nn.Parameter, memory: Tensor) -> None:
    """Leave the memory of a weight, which others hold, to the next engine: the weight stays partitioned until then."""
    vars(param)[_MEMORY] = memory


def take_left(module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """The weights of ``module`` that an engine has left partitioned though others hold their memory, and that."""
    return [(param, vars(param).pop(_MEMORY)) for param in module.parameters() if _MEMORY in vars(param)]


def holders(tensor: Tensor) -> int:
    """How many tensors have the memory of ``tensor``, itself included."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # without the object that asks


def held_weights(module: nn.Module, known: Mapping[int, int] | None = None) -> list[tuple[nn.Parameter, Tensor]]:
    """The whole weights of ``module`` whose memory is also held by tensors outside of it, and that memory.

    Args:
        module: The module.
        known: By address of a storage, how many tensors have it that are no user's. By default, those of the module.
    """
    whole = [param for param in module.parameters() if not hasattr(param, "ds_id")]
    of_module = Counter(param.untyped_storage().data_ptr() for param in whole)  # a buffer follows a weight, too
    ours = of_module if known is None else {**of_module, **known}
    return [
        (param, param.data)
        for param in whole
        if param.numel() and holders(param) > ours[param.untyped_storage().data_ptr()]
    ]
