"""Optimizer states that the user has kept: under DDP the next step updates the tensors that he has."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from lightning_zeroplus.gradients.followed import Memory


class OneState(dict[str, Any]):
    """The states of one parameter: a dict that can be referred to weakly."""


class Followed:
    """What the user may have kept of the states that a step has put back.

    Args:
        states: By a key, the states of each parameter.
    """

    def __init__(self, states: Mapping[Any, Mapping[str, Any]]) -> None:
        self._dicts = {key: weakref.ref(own) for key, own in states.items() if isinstance(own, OneState)}
        self._tensors = {
            (key, name): Memory(value)
            for key, own in states.items()
            for name, value in own.items()
            if isinstance(value, Tensor)
        }

    def _kept(self) -> Iterator[tuple[Any, str, Tensor]]:
        for (key, name), memory in self._tensors.items():
            tensor = memory.tensor()
            if tensor is not None:
                yield key, name, tensor

    def is_any_kept(self) -> bool:
        """Whether the user has something of them still."""
        return any(own() is not None for own in self._dicts.values()) or any(True for _ in self._kept())

    @torch.no_grad()
    def update(self, states: Mapping[Any, MutableMapping[str, Any]]) -> dict[Any, OneState]:
        """Update what is kept.

        Args:
            states: By the same keys, the states after the step.

        Returns:
            The kept dicts, and in place of others the given ones, with the kept tensors.
        """
        for key, name, tensor in self._kept():
            now = states.get(key, {}).get(name)
            if isinstance(now, Tensor) and now.shape == tensor.shape:
                states[key][name] = tensor.copy_(now)
        result = {}
        for key, own in states.items():
            kept = self._dicts.get(key, lambda: None)()
            if kept is not None:
                kept.clear()
                kept.update(own)
            result[key] = OneState(own) if kept is None else kept
        return result
