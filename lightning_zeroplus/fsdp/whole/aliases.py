"""What shares the memory of a parameter, where ``param.data = tensor`` cannot give it another one.

In an ordinary module the parameter then has the tensor's memory, and what it had before stays as it was for whoever
has kept it. FSDP2 gathers from one place from the beginning of a fit to its end: values are copied to it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef


class Aliases:
    """The tensors that users have got as ``param.data`` or ``param.detach()``, and what they have assigned.

    Args:
        sharded: The sharded parameter.
    """

    def __init__(self, sharded: DTensor) -> None:
        self._sharded = sharded
        self._given: list[weakref.ref[Tensor]] = []
        self._assigned: StorageWeakRef | None = None

    def add(self, alias: Tensor) -> None:
        """A user has got ``alias``."""
        self._given = [reference for reference in self._given if reference() is not None]
        self._given.append(weakref.ref(alias))

    def part(self, value: Tensor) -> None:
        """``param.data = value`` begins: what was given out keeps its values, in memory of its own."""
        self._assigned = None
        for reference in self._given:
            alias: Any = reference()
            if alias is None or alias is value:
                continue
            if isinstance(alias, DTensor):
                alias._local_tensor = alias._local_tensor.clone()
                alias.link = None  # type: ignore[attr-defined]
            else:
                with torch.no_grad():
                    alias.set_(alias.clone())
                alias._was_given = True
        self._given.clear()

    def join(self, value: Any) -> None:
        """``param.data = value`` is done: ``value`` has the parameter's memory, if both are sharded alike."""
        other = getattr(value, "link", None)
        if isinstance(value, DTensor) and other is None and value._spec == self._sharded._spec:
            value._local_tensor = self._sharded._local_tensor
            self.add(value)
        elif (other is None or other.sharded is not self._sharded) and not hasattr(value, "_was_given"):
            local = value._local_tensor if isinstance(value, DTensor) else value
            self._assigned = StorageWeakRef(local.untyped_storage())

    def check(self) -> None:
        """An optimizer is about to step.

        Raises:
            RuntimeError: If a tensor was assigned that is still there, and that the step would change under DDP.
        """
        if self._assigned is not None and not self._assigned.expired():
            raise RuntimeError(
                "`param.data = tensor`, and the tensor is still there at optimizer.step(), which would change it too"
                " under DDP. Under FSDP2 a parameter keeps its own, sharded memory. Assign a copy, `param.data ="
                " tensor.clone()`, or write the values, `param.data.copy_(tensor)`."
            )
