"""Tensors that share the memory of a sharded parameter, whose memory ``param.data = tensor`` cannot replace.

In an ordinary module the parameter gets the tensor's memory, and whoever has kept the old memory still has the old
values. FSDP2 gathers from the same memory for the whole fit, so values are copied to it. The assigned tensor becomes a
view of the weight, which follows it. Others that have the tensor's memory would not: nobody is asked when one is read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zeroplus.fsdp.whole.layout import Source, as_stored, gather, same_memory, scatter
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
        self._is_assigned: Callable[[], bool] | None = None  # a tensor, and lives on

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
        self._is_assigned = None
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
        elif self._is_view(value):  # `param.data = param.data`: it follows already, unless its layout is another one
            if self.is_turned_view(value):
                turned = weakref.ref(value)
                self._is_assigned = lambda: turned() is not None
        elif getattr(getattr(getattr(value, "_source", None), "tensor", None), "link", None) is not None:
            self._is_assigned = lambda: True  # memory of another parameter
        elif (other is None or other.sharded is not self._sharded) and not hasattr(value, "_was_given"):
            local = value._local_tensor if isinstance(value, DTensor) else value
            storage = StorageWeakRef(local.untyped_storage())
            self._is_assigned = lambda: not storage.expired()

    def is_turned_view(self, value: Any) -> bool:
        """Whether ``value`` is a view of the parameter's memory with another layout, such as ``param.data.T``."""
        return self._is_view(value) and (
            value.storage_offset() != value._source.full.storage_offset()
            or value.stride() != value._source.full.stride()
        )

    def _is_view(self, value: Any) -> bool:
        source = getattr(value, "_source", None)
        return source is not None and source.tensor is self._sharded

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
        if self._is_assigned is not None and self._is_assigned():
            raise RuntimeError(
                "`param.data = tensor` was assigned, and others have the tensor's memory, or it has another dtype or"
                " device: optimizer.step() would change it too under DDP. Under FSDP2 a parameter keeps its own,"
                " sharded memory. Assign a copy, `param.data = tensor.clone()`, or write the values,"
                " `param.data.copy_(tensor)`."
            )


class OutsideMemory(Source):
    """A whole tensor whose memory others than torch have, as ``param.detach().numpy()`` does.

    Nobody is told what is read and written there. So the memory is compared with what it had, before the tensor is
    used, and gets the tensor's values after each change.

    Args:
        tensor: The sharded tensor: a weight, or a gradient.
        full: The whole one.

    Attributes:
        is_known: Someone has asked for the address, which counts until the tensor changes.
        is_common: It is a gradient's, and all ranks have it: until the next step.
    """

    is_known = False

    def __init__(self, tensor: Any, full: Tensor) -> None:
        super().__init__(tensor, full)
        self._before = _bytes(self.full).clone()
        self.is_common = self.link is None

    def is_held(self) -> bool:
        """Whether anyone may use the memory still."""
        return self.is_common or self.is_known or holders(self.full) > 1

    def is_of(self, tensor: Any) -> bool:
        """Whether it is the memory of this sharded tensor, or of one that shares its shards."""
        if tensor is None:
            return False
        is_linked = self.link is not None and getattr(tensor, "link", None) is self.link
        return is_linked or same_memory(tensor._local_tensor, self.tensor)

    def settle(self) -> None:
        """Write what others have written to the shards; no collective."""
        now = _bytes(self.full)
        if torch.equal(now, self._before):
            return
        self._before.copy_(now)
        if self.link is not None:
            self.link.before_write()
        self.store()

    def follow(self) -> None:
        """Get the values of a tensor that has changed; a collective then.

        Raises:
            RuntimeError: It is a gradient of an earlier step, which not all ranks may have.
        """
        if self._seen == self._now():
            return
        self.is_known = False
        if not self.is_held():
            return
        if self.link is not None or self.is_common:
            self.refresh()
            return
        with as_stored(), torch.no_grad():
            ours, now = scatter(self.full, self.tensor)._local_tensor, self.tensor._local_tensor
        if not torch.equal(_bytes(ours), _bytes(now)):
            raise RuntimeError(
                "`param.grad.numpy()` was kept over a step, and the gradient was written since: under DDP the array"
                " would follow. Keep a copy, `param.grad.numpy().copy()`, or call `numpy()` again after the step."
            )

    def _take(self, now: Tensor) -> None:
        super()._take(now)
        self._before.copy_(_bytes(self.full))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


class Outside:
    """The tensors whose memory others than torch have."""

    def __init__(self) -> None:
        self._all: list[OutsideMemory] = []

    def give(self, tensor: Any, address: bool = False) -> Tensor:
        """The whole of a sharded tensor, in memory that may be given away.

        Args:
            tensor: The sharded tensor.
            address: Only the memory's address is given away.
        """
        self.settle([tensor])
        found = next((each for each in self._all if each.is_of(tensor) and each.full.shape == tensor.shape), None)
        if found is None:
            found = OutsideMemory(tensor, gather(tensor).clone())
            self.note(found)
        found.refresh()
        found.is_known = found.is_known or address
        return found.full.detach()

    def give_part(self, source: Source, part: Tensor) -> Tensor:
        """As :meth:`give`, of a view of a weight.

        Args:
            source: The weight.
            part: Some of ``source.full``.
        """
        weight = source.weight()
        memory = weight if type(weight) is Tensor else self.give(weight)
        offset = (part.data_ptr() - source.full.data_ptr()) // part.element_size()
        return memory.flatten().view(part.dtype).as_strided(part.shape, part.stride(), offset)

    def note(self, memory: OutsideMemory) -> None:
        """Note memory that others have, or will have."""
        self._all.append(memory)
        if memory.link is not None:
            memory.link.aliases.note(memory)

    def settle(self, tensors: Iterable[Any] | None = None) -> None:
        """Before these tensors, or all, are used: take over what others have written."""
        if not self._all:
            return
        tensors = None if tensors is None else list(tensors)
        for each in self._all:
            if tensors is None or any(map(each.is_of, tensors)):
                each.settle()

    def follow(self, stepped: bool = False) -> None:
        """After changes: let others see them.

        Args:
            stepped: An optimizer has stepped.
        """
        self.settle()
        for each in self._all:
            each.follow()
            each.is_common = each.is_common and not stepped
        self._all = [each for each in self._all if each.is_held()]

    def end(self, tensors: Iterable[Any]) -> list[OutsideMemory]:
        """The fit of these weights is over: forget, and return, the memory that others have of them."""
        tensors = list(tensors)
        self.settle(tensors)
        ended = [each for each in self._all if each.link is None or any(map(each.is_of, tensors))]
        self._all = [each for each in self._all if each not in ended]
        return ended


outside = Outside()


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
