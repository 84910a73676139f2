"""What hooks did to a checkpoint's ``state_dict``, whose tensors may be partitioned or still in their files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

#: What a tensor says of itself without its values.
_KNOWN = frozenset(
    "shape dtype ndim requires_grad is_leaf layout names grad grad_fn size dim ndimension numel nelement stride"
    " element_size is_floating_point is_complex is_contiguous itemsize nbytes __len__ __hash__".split()
)


class Chosen(NamedTuple):
    """The entries of a ``state_dict`` that are saved.

    Attributes:
        kept: Names of the parameters whose weights are saved, by each rank its part.
        extra: Entries that are saved whole: buffers, and what a hook has added.
    """

    kept: frozenset[str]
    extra: dict[str, Any]


def choose(state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], extra: Collection[str]) -> Chosen:
    """Sort the entries of ``checkpoint["state_dict"]``, which a hook or the user's ``state_dict()`` may have changed.

    Args:
        state: ``checkpoint["state_dict"]``.
        parameters: Parameters of the module by name; a tied one under each of its names.
        extra: Names of the other entries of the module's own ``state_dict()``.

    Raises:
        RuntimeError: If a renamed or copied entry is empty, because its parameter is partitioned.
    """
    kept, others = set(), {}
    for name, value in state.items():
        if name in parameters and _is_weight(value, parameters[name]):
            kept.add(name)
        elif (
            name not in extra
            and _is_empty(value)
            and any(_is_empty(param) or hasattr(param, "ds_id") for param in parameters.values())
        ):
            raise RuntimeError(
                f"The checkpoint's `state_dict` has {name!r}, which is the empty rest of a partitioned parameter: a"
                " hook has renamed or copied it. At ZeRO stage 3 it may only leave weights out. Rename them in the"
                " file that `lightning_zeroplus.export` writes. Nothing has been saved."
            )
        else:
            others[name] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
    return Chosen(frozenset(kept), others)


def _is_weight(value: Any, param: nn.Parameter) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return isinstance(value, Tensor) and (
            value is param
            or (_is_empty(value) and getattr(param, "ds_numel", 0) > 0)  # the hook may have gathered it since
            or (value.shape, value.dtype, value.data_ptr()) == (param.shape, param.dtype, param.data_ptr())
        )


def _is_empty(value: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return isinstance(value, Tensor) and not value.numel()


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


class Placeholders:
    """A ``state_dict`` for ``on_load_checkpoint``, whose weights are still in their files.

    A hook may drop, rename, replace and change weights, and add tensors. What it looks at is read whole on its rank;
    everything else is read later, by each rank its part.

    Args:
        weights: The weights, by name.
        extra: Entries that are not weights, unchanged.
    """

    def __init__(self, weights: Mapping[str, Unread], extra: Mapping[str, Any]) -> None:
        self._names = {id(value): name for name, value in weights.items()}
        self._weights = weights  # kept alive: their ids must stay unique
        self.state_dict: dict[str, Any] = {**weights, **extra}
        self._offered = dict(self.state_dict)

    def changed(self, state: Mapping[str, Any]) -> bool:
        """Whether a hook has changed any entry, or may have."""
        same = state.keys() == self._offered.keys() and all(state[name] is self._offered[name] for name in state)
        return not same or any(value.whole is not None for value in self._weights.values())

    def stored_names(self, state: Mapping[str, Any]) -> dict[str, str]:
        """The names in the files of the weights in ``state`` that nobody has read, by their names there."""
        return {
            name: self._names[id(value)]
            for name, value in state.items()
            if isinstance(value, Unread) and value.whole is None
        }
