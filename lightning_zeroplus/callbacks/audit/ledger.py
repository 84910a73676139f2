"""The computed gradients: the raw gradient of every backward, read at the leaf before any strategy changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle


@dataclass
class Entry:
    """The gradients of one parameter since they were last zeroed.

    Attributes:
        total: Their sum, unscaled, in at least fp32, in the parameter's full shape.
        magnitude: The sum of their L2 norms, a float64 scalar; zero if there were none.
        backwards: How many there were.
        dtype: Their dtype; None if there were none.
    """

    total: Tensor
    magnitude: Tensor
    backwards: int
    dtype: torch.dtype | None


class Ledger:
    """Sums the local gradients of leaves, by name.

    A tensor hook on a leaf gets the gradient that one backward has computed for it on this rank, right before autograd
    accumulates it: no reduction, no partitioning and no other backward has changed it yet. A leaf that is used several
    times in one backward gets one gradient. A backward nested in another counts by itself.

    Args:
        loss_scale: Returns the factor of the running backward's loss: the fp16 loss scale, else 1.
        device: The device of the zeros that stand for parameters without a gradient on this rank.
    """

    def __init__(self, loss_scale: Callable[[], float], device: torch.device) -> None:
        self._loss_scale = loss_scale
        self._device = device
        self._entries: dict[str, Entry] = {}
        self._handles: list[RemovableHandle] = []

    def watch(self, name: str, leaf: Tensor) -> None:
        """Add every gradient of ``leaf`` to the entry ``name``."""
        self._handles.append(leaf.register_hook(partial(self._add, name)))

    def _add(self, name: str, grad: Tensor) -> None:
        with torch.no_grad():
            dense = grad.to_dense() if grad.is_sparse else grad
            part = dense.to(torch.promote_types(grad.dtype, torch.float32), copy=True).div_(self._loss_scale())
            norm = torch.linalg.vector_norm(part, dtype=torch.float64)
            entry = self._entries.get(name)
            if entry is None:
                self._entries[name] = Entry(part, norm, 1, grad.dtype)
            else:
                entry.total.add_(part)
                entry.magnitude.add_(norm)
                entry.backwards += 1

    def entry(self, name: str, shape: Iterable[int]) -> Entry:
        """Return the entry of a parameter of this shape; a zero entry if it got no gradient."""
        if name not in self._entries:
            zeros = torch.zeros(tuple(shape), dtype=torch.float32, device=self._device)
            none = torch.zeros((), dtype=torch.float64, device=self._device)
            self._entries[name] = Entry(zeros, none, 0, None)
        return self._entries[name]

    def average(self, shapes: Mapping[str, Iterable[int]]) -> None:
        """Average the sums and magnitudes of these parameters over the ranks, in place.

        Takes two all-reduces per parameter: all ranks must call it with the same names in the same order. An average
        stays the same when it is averaged again. Later local gradients are added to it, as under reduction in every
        backward.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        for name, shape in shapes.items():
            entry = self.entry(name, shape)
            if world_size > 1:
                for value in (entry.total, entry.magnitude):
                    dist.all_reduce(value)
                    value.div_(world_size)

    def forget(self, names: Iterable[str]) -> None:
        """Drop the entries of these parameters, as ``zero_grad()`` does their gradients."""
        for name in names:
            self._entries.pop(name, None)

    def close(self) -> None:
        """Remove the hooks and release the sums."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._entries.clear()
