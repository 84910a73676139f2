"""The memory that every operator reads and writes, from its schema."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# These read the shape of their argument, not its values.
_SHAPE_ONLY = re.compile(r"aten::(new_\w+|\w+_like)$")
# These allocate memory without filling it, or read or change metadata only.
_NO_ACCESS = re.compile(r"aten::(new_|)empty(_like|_strided|_permuted|)$|aten::(set_|resize_|record_stream|is_\w+)$")
# The host waits for the stream, because it gets a value, if only the size of the output.
HOST_READS = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::_unique2",
        "aten::equal",
        "aten::is_nonzero",
        "aten::masked_select",
        "aten::nonzero",
        "aten::unique_dim",
        "Tensor.numpy",
        "Tensor.tolist",
    }
)
_COLLECTIVES = ("c10d::", "_c10d_functional::")


class Accesses(NamedTuple):
    """The memory that one operator call touches.

    Attributes:
        reads: Tensors whose values it reads.
        writes: Tensors whose values it changes or makes.
        fresh: Outputs in new memory, filled or not.
    """

    reads: list[Tensor]
    writes: list[Tensor]
    fresh: list[Tensor]


def accesses(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Accesses:
    """The accesses of a call that has returned ``output``."""
    schema = function._schema
    name: str = schema.name
    inputs = _tensors((args, kwargs))
    result = Accesses([], [], [])
    if name.startswith(_COLLECTIVES):
        for parameter, value in _bound(schema, args, kwargs):
            _collective_argument(result, name, parameter.name, _tensors(value))
        result.fresh.extend(_new(_tensors(output), inputs))
        result.writes.extend(result.fresh)
        return result
    for parameter, value in _bound(schema, args, kwargs):
        alias = parameter.alias_info
        if alias is not None and alias.is_write:
            result.writes.extend(_tensors(value))
        elif alias is None and not _SHAPE_ONLY.match(name):
            result.reads.extend(_tensors(value))
    outputs = output if len(schema.returns) > 1 else (output,)
    returned = [
        tensor
        for declared, value in zip(schema.returns, outputs)  # noqa: B905 -- an operator may return nothing
        if declared.alias_info is None
        for tensor in _tensors(value)
    ]
    result.fresh.extend(_new(returned, inputs))
    if len(result.fresh) < len(returned):
        result.reads.clear()  # a view whose schema does not say so, such as _unsafe_view
    result.writes.extend(result.fresh)
    if _NO_ACCESS.match(name):
        result.reads.clear()
        result.writes.clear()
    return result


def _collective_argument(result: Accesses, name: str, argument: str, tensors: list[Tensor]) -> None:
    if name.startswith("_c10d_functional::"):
        (result.writes if name.endswith("_") else result.reads).extend(tensors)
    elif "output" in argument or name.startswith("c10d::recv"):
        result.writes.extend(tensors)
    elif "input" in argument or name.startswith("c10d::send"):
        result.reads.extend(tensors)
    else:  # in place
        result.writes.extend(tensors)


def is_collective(name: str) -> bool:
    """Whether an operator is a collective or a point-to-point operation."""
    return name.startswith(_COLLECTIVES)


def _bound(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    given = dict(zip((parameter.name for parameter in schema.arguments), args))  # noqa: B905 -- the rest are defaults
    given.update(kwargs)
    return [(parameter, given[parameter.name]) for parameter in schema.arguments if parameter.name in given]


def _tensors(value: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor)
        and leaf.device.type == "cpu"
        and leaf.layout == torch.strided
        and leaf.untyped_storage().nbytes()
    ]


def _new(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    known = {tensor.untyped_storage()._cdata for tensor in inputs}
    return [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known]


class AccessMode(TorchDispatchMode):
    """Reports every operator call below autograd.

    Args:
        report: Called after each operator, with its name and its accesses.
    """

    def __init__(self, report: Callable[[str, Accesses], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        touched = accesses(func, args, kwargs, output)
        if any(touched):
            self._report(func._schema.name, touched)
        return output
