"""Views of a weight of stage 3 that outlive its release: a graph keeps ``weight.t()`` for its backward.

Upstream gathers the weight into other memory next. What a user then writes by ``p.data``, such views would not get.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import Tensor

#: An attribute of a weight: the memory that it had when it was released, and where in it the weight began.
VIEWED = "_zeroplus_viewed"
_DATA: Any = Tensor.data


def note(param: Any) -> None:
    """Note, without keeping it, the memory of a gathered weight that is about to be released."""
    # Torch keeps the object of a storage as long as any tensor has the storage.
    vars(param)[VIEWED] = weakref.ref(param.untyped_storage()), param.storage_offset()


def memory(param: Any) -> Tensor | None:
    """The memory of a weight's views, with the values of the whole weight; None if there are no views.

    Args:
        param: The weight, gathered. If it is in that memory already, it is returned as it is.
    """
    noted = vars(param).get(VIEWED)
    if noted is None:
        return None
    storage, offset = noted
    found, values = storage(), _DATA.__get__(param)
    if found is None or found.nbytes() < (offset + values.numel()) * values.element_size():
        vars(param).pop(VIEWED)  # it is gone, or upstream has freed it, whoever has it
        return None
    if found.data_ptr() == values.untyped_storage().data_ptr():
        return cast(Tensor, values)
    memory = torch.empty(0, dtype=values.dtype, device=values.device)
    return memory.set_(found, offset, values.shape, values.stride()).copy_(values)


def place(param: Any, apart: bool) -> Tensor:
    """The tensor that a gathered weight is from now on, with its values.

    Args:
        param: The weight.
        apart: Whether it gets new memory, if it has no views.
    """
    found, values = memory(param), _DATA.__get__(param)
    if found is not None:
        return found
    return cast(Tensor, values.clone() if apart else values)
