"""The random numbers of a chunk's first pass, drawn again in its second."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import get_device_states, set_device_states


class RandomState(NamedTuple):
    """The states of the random number generators of the CPU and of some devices."""

    cpu: Tensor
    devices: list[int]
    states: list[Tensor]

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> RandomState:
        tensors = [torch.empty(0, device=device) for device in devices if device.type not in ("cpu", "meta")]
        return cls(torch.get_rng_state(), *get_device_states(*tensors))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers again within; afterwards restore the generators."""
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states)
            yield


def devices_of(encoder: Any, inputs: Any) -> set[torch.device]:
    """Where an encoder may draw random numbers.

    Args:
        encoder: A module, a method of one, or a partial function of these: where its parameters and buffers are. It may
            move its inputs, a tokenizer's dictionary of CPU tensors for example, to its own device.
        inputs: Any nesting of tensors.
    """
    while isinstance(encoder, functools.partial):
        encoder = encoder.func
    module = encoder if isinstance(encoder, nn.Module) else getattr(encoder, "__self__", None)
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if isinstance(module, nn.Module):
        tensors += [*module.parameters(), *module.buffers()]
    return {tensor.device for tensor in tensors}
