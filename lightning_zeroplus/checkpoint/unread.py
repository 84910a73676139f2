"""A weight that is still in its file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

#: What a tensor says of itself without its values.
_KNOWN = frozenset(
    "shape dtype ndim requires_grad is_leaf layout names grad grad_fn size dim ndimension numel nelement stride"
    " element_size is_floating_point is_complex is_contiguous itemsize nbytes __len__ __hash__".split()
)


class Unread(Tensor):
    """A weight on the meta device that is read, whole, as soon as an operation needs its values.

    From then on it is an ordinary tensor on the CPU, for whoever uses it: results are ordinary tensors, writes to it
    and to its views stay.

    Attributes:
        read: Reads the weight.
        whole: The weight, if it was read.
    """

    read: Callable[[], Tensor]
    whole: Tensor | None

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> Unread:
        """A weight of this shape and dtype."""
        unread = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        unread.read, unread.whole = read, None
        return unread

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run what needs no values as it is, everything else on the whole weights."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            accessor = func.__name__ in ("__get__", "__set__")
            name = getattr(getattr(func, "__self__", None), "__name__", "") if accessor else func.__name__
            if name in _KNOWN and func.__name__ != "__set__":
                return func(*args, **kwargs)
            args, kwargs = tree_map_only(Unread, _whole, (args, kwargs))
            return func(*args, **kwargs)


def _whole(tensor: Unread) -> Tensor:
    if tensor.whole is None:
        tensor.whole = tensor.read()
    return tensor.whole
