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


class _Shown:
    """One that the user gets as itself, where he has kept that, and not only a view of it."""

    def __init__(self, tensor: Tensor) -> None:
        self._itself = weakref.ref(tensor)
        self._memory = Memory(tensor) if tensor.layout is torch.strided else None

    def tensor(self) -> Tensor | None:
        itself = self._itself()
        return self._memory.tensor() if itself is None and self._memory is not None else itself


class LeftBehind:
    """Gradients of this rank alone that the user got before they were reduced, and may have kept.

    Under DDP they become the averages. Here the averages are elsewhere, and other ranks may have kept nothing.
    """

    def __init__(self) -> None:
        self._got: list[tuple[int, weakref.ref[Tensor]]] = []
        self._since: list[tuple[int, weakref.ref[Tensor], int]] = []

    def note(self, index: int, grad: Tensor) -> None:
        """The user gets a parameter's gradient."""
        self._got.append((index, weakref.ref(grad)))

    def reduced(self) -> None:
        """What the user got is not the gradient any more."""
        while self._got:
            index, reference = self._got.pop()
            grad = reference()
            if grad is not None:
                self._since.append((index, reference, grad._version))

    def forget(self, indices: Container[int] | None) -> None:
        """The gradients of these parameters, or all, are None."""
        self._since = [] if indices is None else [each for each in self._since if each[0] not in indices]

    def check(self) -> None:
        """Refuse what was written to them.

        Raises:
            RuntimeError: If it was; it would count under DDP.
        """
        for _, reference, version in self._since:
            grad = reference()
            if grad is not None and grad._version != version:
                raise RuntimeError(
                    "A gradient was kept inside a coalesce() window or no_sync(), and written after it was reduced."
                    " Under DDP the kept tensor is the averaged gradient then; ZeRO has that elsewhere. Keep"
                    " `param.grad` after the window."
                )


class KeptGradients:
    """The gradients that the user has seen, and may have kept.

    Args:
        shown: The whole gradients, by index of the parameter.

    Attributes:
        are_current: Whether what is kept is the gradient: no backward has added to it since.
    """

    def __init__(self, shown: Mapping[int, Tensor]) -> None:
        self.are_current = True
        self._seen = {index: _Shown(grad) for index, grad in shown.items()}

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
            if now is not None and now is not kept and now.shape == kept.shape and now.layout is kept.layout:
                result[index] = kept.copy_(now)
        return result


class Unscaled:
    """A gradient without its loss scale, in fp32: in fp16 what is left may be too small."""

    def __init__(self, scaled: Tensor, scale: float) -> None:
        self._scaled, self._scale = scaled, scale
        self.shown = scaled.detach().float() / scale
        self._version = self.shown._version

    def put_back(self) -> None:
        """Write to the scaled gradient if this one was written to."""
        if self.shown._version != self._version:
            with torch.no_grad():
                self._scaled.copy_(self.shown * self._scale)
