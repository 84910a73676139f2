"""Tensors that share the memory of a sharded parameter, whose memory ``param.data = tensor`` cannot replace.

In an ordinary module the parameter gets the tensor's memory, and whoever has kept the old memory still has the old
values. FSDP2 gathers from the same memory for the whole fit, so values are copied to it. The assigned tensor becomes a
view of the weight, which follows it. Others that have the tensor's memory would not: nobody is asked when one is read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zeroplus.fsdp.whole.layout import Source, as_stored, same_memory
from lightning_zeroplus.weights.holders import holders


class Aliases:
    """The tensors that users got by ``param.data`` or ``param.detach()``, and the tensor that they assigned.

    Args:
        sharded: The sharded parameter.
        follow: Makes a whole tensor a view of the sharded one, in place.
    """

    def __init__(self, sharded: DTensor, follow: Callable[[Tensor, Source], Any]) -> None:
        self._sharded, self._follow = sharded, follow
        self._given: list[weakref.ref[Tensor]] = []
        self._sources: list[weakref.ref[Source]] = []
        self._assigned: StorageWeakRef | None = None

    def add(self, alias: Tensor) -> None:
        """Note that a user has got ``alias``."""
        self._given = [reference for reference in self._given if reference() is not None]
        self._given.append(weakref.ref(alias))
        if (source := getattr(alias, "_source", None)) is not None:
            self.note(source)

    def note(self, source: Source) -> None:
        """Note that users may have views of what was gathered from the parameter."""
        self._sources = [reference for reference in self._sources if reference() is not None]
        self._sources.append(weakref.ref(source))

    def sources(self) -> list[Source]:
        """What users have views of."""
        return [source for reference in self._sources if (source := reference()) is not None]

    def given(self) -> list[Tensor]:
        """What :meth:`add` was called with, as far as users still have it."""
        return [alias for reference in self._given if (alias := reference()) is not None]

    def part(self, value: Tensor) -> None:
        """Before ``param.data = value``: give the aliases memory of their own, in which they keep their values."""
        self._assigned = None
        for reference in self._given:
            alias: Any = reference()
            if alias is None or alias is value:
                continue
            if (source := getattr(alias, "_source", None)) is not None:
                source.refresh()
            if isinstance(alias, DTensor):
                alias._local_tensor = alias._local_tensor.clone()
                alias.link = None  # type: ignore[attr-defined]
            else:
                with torch.no_grad(), as_stored():
                    alias.__class__ = Tensor
                    alias.set_(alias.clone())
                alias._was_given = True
        self._given.clear()

    def join(self, value: Any) -> None:
        """After ``param.data = value``: give ``value`` the parameter's memory, if both are sharded alike."""
        other = getattr(value, "link", None)
        if isinstance(value, DTensor) and other is None and value._spec == self._sharded._spec:
            value._local_tensor = self._sharded._local_tensor
            self.add(value)
        elif self._can_follow(value):
            with as_stored(), torch.no_grad():
                self._follow(value, Source(self._sharded, value.detach()))
            self.add(value)
        elif (other is None or other.sharded is not self._sharded) and not hasattr(value, "_was_given"):
            local = value._local_tensor if isinstance(value, DTensor) else value
            self._assigned = StorageWeakRef(local.untyped_storage())

    def _can_follow(self, value: Any) -> bool:
        """Whether nobody else has the memory of ``value``, who would not see what is written to it later."""
        return (
            type(value) is Tensor
            and value.dtype == self._sharded.dtype
            and value.device == self._sharded.device
            and not value.requires_grad
            and value.numel() * value.itemsize == value.untyped_storage().nbytes()
            and holders(value) == 1
        )

    def check(self) -> None:
        """Before an optimizer step: refuse a tensor assigned to ``data`` that the step would change under DDP.

        Raises:
            RuntimeError: If there is one.
        """
        if self._assigned is not None and not self._assigned.expired():
            raise RuntimeError(
                "`param.data = tensor` was assigned, and others have the tensor's memory, or it has another dtype or"
                " device: optimizer.step() would change it too under DDP. Under FSDP2 a parameter keeps its own,"
                " sharded memory. Assign a copy, `param.data = tensor.clone()`, or write the values,"
                " `param.data.copy_(tensor)`."
            )


class AssignedGradient:
    """A whole tensor that was assigned to ``param.grad``, of which the gradient is a sharded copy.

    Args:
        given: The tensor.
        sharded: The sharded parameter, whose ``grad`` is the copy.
    """

    def __init__(self, given: Tensor, sharded: DTensor) -> None:
        self._storage = StorageWeakRef(given.untyped_storage())
        # Views share the count of writes with what they are views of, which the user may have kept in their place.
        base = given if given._base is None else given._base
        self._base, self._version = weakref.ref(base), given._version
        self._sharded = sharded
        with as_stored():
            grad: Any = sharded.grad
        self._grad = weakref.ref(grad)
        self._is_copy = not same_memory(given, grad)

    def is_gradient(self) -> bool:
        """Whether the tensor still exists, and the copy is still the gradient."""
        with as_stored():
            return self._is_copy and not self._storage.expired() and self._sharded.grad is self._grad()

    def check_backward(self) -> None:
        """Refuse a backward that would add to the tensor under DDP.

        Raises:
            RuntimeError: If the tensor still exists.
        """
        if self.is_gradient():
            raise RuntimeError(
                "`param.grad = tensor` was assigned, and the tensor still exists at the next backward, which would add"
                f" to it under DDP. {_ASSIGN_COPY}"
            )

    def check_step(self) -> None:
        """Refuse a step with a gradient that would be another one under DDP.

        Raises:
            RuntimeError: If the tensor was written.
        """
        base = self._base()
        if base is not None and base._version != self._version and self.is_gradient():
            raise RuntimeError(
                "`param.grad = tensor` was assigned, and the tensor was written before optimizer.step(), which would"
                f" use that under DDP. {_ASSIGN_COPY}"
            )


_ASSIGN_COPY = (
    "Under FSDP2 a gradient has its own, sharded memory. Assign a copy, `param.grad = tensor.clone()`, and use"
    " `param.grad` afterwards."
)
