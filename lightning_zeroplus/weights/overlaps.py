"""Weights that have the same memory: an update of one changes the other, which sharded weights cannot do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_Named = tuple[str, Tensor]


def overlaps(tensors: Iterable[_Named]) -> Iterator[tuple[str, str]]:
    """The names of each two tensors that have some element in common.

    Args:
        tensors: Strided tensors, by name. Those without memory, such as tensors on the meta device, count as apart.
    """
    by_storage: dict[int, list[_Named]] = {}
    for name, tensor in tensors:
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for address, group in by_storage.items():
        if address and len(group) > 1:
            for (one, first), (other, second) in _near(group):
                if _have_common(first, second):
                    yield one, other


def check_apart(weights: Iterable[_Named]) -> None:
    """Before a step: refuse weights of which one was given the memory of another, by ``first.data = second.data``.

    Raises:
        RuntimeError: If there are two, naming them.
    """
    found = next(overlaps(weights), None)
    if found is not None:
        raise RuntimeError(
            f"The parameters {found[0]!r} and {found[1]!r} have the same memory since one was assigned to the other:"
            " under DDP an update of one changes the other, too, and sharded weights lie apart. Copy the values,"
            " `first.data.copy_(second)`, or share the parameter before the fit, `first_module.weight ="
            " second_module.weight`. No weight was updated."
        )


def _near(group: list[_Named]) -> Iterator[tuple[_Named, _Named]]:
    """The pairs whose first and last elements enclose common memory."""
    ordered = sorted(group, key=lambda named: named[1].data_ptr())
    if all(_end(first) <= second.data_ptr() for (_, first), (_, second) in pairwise(ordered)):
        return
    for index, each in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other[1].data_ptr() >= _end(each[1]):
                break
            yield each, other


def _span(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + _span(tensor) * tensor.itemsize


def _have_common(first: Tensor, second: Tensor) -> bool:
    if first.itemsize != second.itemsize or (first.is_contiguous() and second.is_contiguous()):
        return True
    return bool(torch.isin(_places(first), _places(second)).any())


def _places(tensor: Tensor) -> Tensor:
    """The places of its elements in its storage."""
    own: Any = torch.arange(_span(tensor)).as_strided(tensor.shape, tensor.stride())
    return own.flatten() + tensor.storage_offset()
