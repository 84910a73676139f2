"""Which operations run on shards, and which need whole tensors; by the names that ``__torch_function__`` sees."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zeroplus.fsdp.whole.layout import shard_like

#: Operations that describe a tensor or set an attribute, without computing values.
METADATA = frozenset(
    """
    size dim ndimension numel nelement stride storage_offset is_contiguous element_size is_complex is_floating_point
    is_signed get_device is_pinned is_shared is_inference is_same_size requires_grad_ retain_grad __len__
    __hash__ __repr__ __format__ __dlpack_device__ __deepcopy__ __reduce_ex__ has_names is_nonzero_size
    _has_compatible_shallow_copy_type
    """.split()
)

#: Where a tensor's values are. Whoever asks this of an entry of a ``state_dict()`` reads there, as safetensors does.
ADDRESSES = frozenset("data_ptr untyped_storage".split())

#: Where a tensor's memory leaves torch.
LEAVES_TORCH = frozenset("numpy __array__ __dlpack__".split())

#: Elementwise operations: the result for a shard depends on this shard only. Also with a trailing underscore, in place.
_POINTWISE = frozenset(
    """
    add sub subtract mul multiply div divide true_divide addcmul addcdiv lerp neg negative abs sign sgn square sqrt
    rsqrt reciprocal pow exp log tanh sigmoid erfinv clamp clip clamp_min clamp_max copy zero fill nan_to_num round
    floor ceil maximum minimum relu add_ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __neg__ __pow__
    __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__ _amp_foreach_non_finite_check_and_unscale
    """.split()
)

#: Copies and casts that keep the shape.
COPIES = frozenset("clone detach to cpu cuda float double half bfloat16 contiguous".split())

#: Reductions, whose partial results are reduced over the ranks.
_REDUCTIONS = frozenset("norm vector_norm linalg_vector_norm sum mean".split())

#: Operations that make tensors of the same shape. They run on shards only within an optimizer, for its states.
_FACTORIES = frozenset("zeros_like ones_like empty_like full_like".split())


#: Between the caller of an operation and the code that intercepts it.
_BETWEEN = ("lightning_zeroplus.fsdp.whole.", "torch._dynamo.")

#: Functions of ``torch.distributed`` that write the same values to their first argument on all ranks, and those that
#: write different values.
GIVE_ALL_ALIKE = frozenset("all_reduce all_reduce_coalesced broadcast".split())
GIVE_OTHERS = frozenset("reduce recv irecv scatter reduce_scatter reduce_scatter_single".split())


def finds_node(name: str) -> bool:
    """Whether the operation is that by which ``torch.autograd.graph`` finds the node where a gradient arrives."""
    frame = sys._getframe(1) if name == "view_as" else None
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == torch.autograd.graph.__name__


def name_of(function: Callable[..., Any]) -> str:
    """The name of an operation, without the prefix of ``torch.linalg``.

    An operator of ``torch.ops.aten`` has it without its overload; one of another library, whose name says nothing, with
    the library's.
    """
    if isinstance(function, OpOverload | OpOverloadPacket):
        library, name = _overloads(function)[0].name().split("::")
        return name.partition(".")[0] if library == "aten" else f"{library}::{name}"
    return getattr(function, "__name__", "").removeprefix("linalg_")


def written(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that a call writes to: those of an operator's schema, ``out``, or the first one."""
    if isinstance(function, OpOverload | OpOverloadPacket):
        return _written_by_schema(function, args, kwargs)
    out = kwargs.get("out")
    if out is not None:
        return tree_leaves(out)
    return tree_leaves(args[0] if args else kwargs["tensor"]) if _writes_first(name_of(function)) else []


def _writes_first(name: str) -> bool:
    if name == "__setitem__":
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__int__", "__index__", "__invert__", "__iter__")
    return name.endswith("_") and name not in ("requires_grad_",)


def _written_by_schema(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    found: dict[int, Any] = {}
    for position, name in _written_arguments(operator):
        given = args[position] if position < len(args) else kwargs.get(name)
        found |= {id(leaf): leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
    return list(found.values())


@functools.cache
def _written_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names. One that has only a name has a position behind all others."""
    found = (
        (sys.maxsize if argument.kwarg_only else position, argument.name)
        for overload in _overloads(operator)
        for position, argument in enumerate(overload._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return tuple(dict.fromkeys(found))


def _overloads(operator: Any) -> list[Any]:
    is_one = isinstance(operator, OpOverload)
    return [operator] if is_one else [getattr(operator, name) for name in operator.overloads()]


def runs_on_shards(name: str, stepping: bool, exact: bool = True) -> bool:
    """Whether the operation, on shards of one layout, gives the shards of its result.

    Args:
        name: The name of the operation.
        stepping: Whether an optimizer runs.
        exact: Whether the dtype is precise enough to round partial results.
    """
    plain = name.removeprefix("_foreach_").removesuffix("_") if not name.startswith("__") else name
    if plain in _POINTWISE or name in COPIES or (exact and plain in _REDUCTIONS):
        return True
    return stepping and name in _FACTORIES


def fit(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what stands at the same place of lists of tensors is laid out in the same way; True for other operations.

    A tensor with one element counts as a number, if all ranks have it. What is written with a single row must be laid
    out like the other sharded tensors, see :func:`on_shards`.
    """
    if _writes_one_row(name, args):
        return _alike(tuple(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)))
    if not _is_of_lists(name):
        return True
    given = (*args, *kwargs.values())
    lists = [each for each in given if isinstance(each, list | tuple)]
    numbers = [each for each in given if isinstance(each, DTensor)]
    return all(map(_alike, zip(*lists, strict=False))) and all(map(_is_number, numbers))


def on_shards(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that :func:`runs_on_shards`.

    DTensor does, but has only some that are elementwise on lists, and none that writes an ordinary tensor to a single
    row, which one rank has. There the other ranks have no row, to which a tensor of one row can be broadcast.
    """
    if not (_is_of_lists(name) or _writes_one_row(name, args)) or not fit(name, args, kwargs):
        return func(*args, **kwargs)
    with torch.no_grad():
        found = func(*tree_map_only(DTensor, _local, args), **tree_map_only(DTensor, _local, kwargs))
    if name.endswith("_"):
        torch.autograd.graph.increment_version(args[0])
        return args[0]
    return [shard_like(each, shard) for shard, each in zip(found, args[0], strict=True)]


@contextmanager
def replicating(target: DTensor) -> Iterator[None]:
    """Treat ordinary tensors as equal on all ranks within, as values written to weights must be."""
    dispatcher = target._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


def _writes_one_row(name: str, args: tuple[Any, ...]) -> bool:
    target: Any = args[0] if args and _writes_first(name) else None
    placements: Any = target.placements if isinstance(target, DTensor) else ()
    return any(placement.is_shard() and target.shape[placement.dim] == 1 for placement in placements)


def _is_of_lists(name: str) -> bool:
    return name.startswith("_foreach_") and name.removeprefix("_foreach_").removesuffix("_") in _POINTWISE


def _alike(tensors: tuple[Any, ...]) -> bool:
    found = [each for each in tensors if isinstance(each, Tensor) and not _is_number(each)]
    layouts = [
        (each._spec.mesh, each._spec.placements, each._spec.shape) for each in found if isinstance(each, DTensor)
    ]
    return len(layouts) == len(found) and all(layout == layouts[0] for layout in layouts)


def _is_number(tensor: Tensor) -> bool:
    return not tensor.ndim and (
        not isinstance(tensor, DTensor) or all(each.is_replicate() for each in tensor.placements)
    )


def _local(tensor: DTensor) -> Tensor:
    return tensor._local_tensor
