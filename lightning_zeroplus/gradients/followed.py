"""Tensors that the user has kept: under DDP they stay what the parameter, or the optimizer, has."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Memory:
    """A tensor, as long as somebody else has its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._like = tensor.dtype, tensor.device, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor | None:
        """The tensor, or another one with its memory; None: nobody has it."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        dtype, device, *place = self._like
        return torch.empty(0, dtype=dtype, device=device).set_(storage, *place)


class _Shown(Memory):
    """One that the user gets as itself, where he has kept that, and not only a view of it."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._itself = weakref.ref(tensor)

    def tensor(self) -> Tensor | None:
        itself = self._itself()
        return super().tensor() if itself is None else itself


class KeptGradients:
    """The gradients that the user has seen, and may have kept.

    Args:
        shown: The whole gradients, by index of the parameter.

    Attributes:
        are_current: Whether what is kept is the gradient: no backward has added to it since.
    """

    def __init__(self, shown: Mapping[int, Tensor]) -> None:
        self.are_current = True
        self._seen = {index: _Shown(grad) for index, grad in shown.items() if grad.layout is torch.strided}

    def tensors(self) -> dict[int, Tensor]:
        """What is kept, by index of the parameter."""
        alive = ((index, seen.tensor()) for index, seen in self._seen.items())
        return {index: tensor for index, tensor in alive if tensor is not None}

    def renumbered(self, numbers: Mapping[int, int]) -> KeptGradients:
        """The same, by other numbers of the parameters."""
        result = KeptGradients({})
        result.are_current = self.are_current
        result._seen = {numbers[index]: seen for index, seen in self._seen.items() if index in numbers}
        return result

    def forget(self, indices: Iterable[int]) -> bool:
        """Let what is kept of these gradients stay as it is; returns whether there are no others."""
        for index in indices:
            self._seen.pop(index, None)
        return not self._seen

    def zero(self, indices: Container[int] | None) -> None:
        """Zero what is kept of these gradients, or of all."""
        for index, kept in self.tensors().items():
            if indices is None or index in indices:
                kept.zero_()

    def updated(self, whole: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The whole gradients, those that are kept in the kept tensors."""
        result = dict(whole)
        for index, kept in self.tensors().items():
            now = whole.get(index)
            if now is not None and now is not kept and now.shape == kept.shape and now.layout is torch.strided:
                result[index] = kept.copy_(now)
        return result
