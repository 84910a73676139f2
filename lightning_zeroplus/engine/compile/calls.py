"""Calls of compiled modules at ZeRO stage 3: compiled if all ranks make the same call, else in Python.

What Dynamo compiles, and when, depends on the previous calls. A compiled graph gathers parameters in an order of its
own, and the passes that compile it gather to profile it. So a rank that compiles, or runs another graph, would wait for
ranks that do not. Here every rank has the same history of compiled calls, hence the same graphs.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zeroplus.gradients.ranks.agreement import is_equal_on_all_ranks


def fingerprint(training: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """A number of 62 bits for all that Dynamo may specialize a call on; equal in all processes.

    Args:
        training: Whether the module is in training mode.
        args: Positional arguments. A tensor counts by shape, strides, dtype and requires_grad; a number, a string or
            None by its value; a mapping, list, tuple or dataclass by its contents; anything else by its type.
        kwargs: Keyword arguments.
    """
    call = repr((training, torch.is_grad_enabled(), _description(args), _description(kwargs)))
    return int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "big") >> 2


def _description(value: Any) -> tuple[Any, ...]:
    kind = type(value).__qualname__
    if isinstance(value, Tensor):
        return kind, tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    if value is None or isinstance(value, bool | int | float | str):
        return kind, value
    if isinstance(value, Mapping):
        return kind, [(_description(key), _description(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return kind, [_description(item) for item in value]
    if dataclasses.is_dataclass(value):
        return kind, [(field.name, _description(getattr(value, field.name))) for field in dataclasses.fields(value)]
    return (kind,)


class SameCalls:
    """Runs modules compiled in those calls that are the same on all ranks.

    Attributes:
        differing: Names of the modules that the ranks have called differently.
    """

    def __init__(self) -> None:
        self.differing: set[str] = set()
        # With NCCL, a comparison on the GPU would wait for all of its queued work.
        self._group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def close(self) -> None:
        """Destroy the process group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def guard(self, name: str, module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A function that calls ``compiled`` if all ranks make the same call, else the module in Python.

        Args:
            name: The module's name, for the report.
            module: The module.
            compiled: The module's compiled ``__call__``.
        """
        in_python = module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return compiled(*args, **kwargs)  # part of the call of another compiled module
            if is_equal_on_all_ranks(fingerprint(module.training, args, kwargs), torch.device("cpu"), self._group):
                return compiled(*args, **kwargs)
            self.differing.add(name)
            return in_python(*args, **kwargs)

        return call
