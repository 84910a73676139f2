"""Compute a unit's deferred weight gradients before the unit is reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_zeroplus.fsdp.units import Unit, Units
from lightning_zeroplus.weight_grads.store import WeightGradStore


class Drain:
    """Flushes a unit's deferred gradients from a store before the unit is reduced.

    FSDP2 reduces a unit when the gradient of its input has been computed, and the remaining units at the end of the
    backward. A gradient that comes later is silently added to the next step's. So a hook on the same input, which runs
    before FSDP2's, flushes the store for the unit. At the end of the backward, also before FSDP2, the store is flushed
    for all units. Units that do not reduce in this backward (``Unit.syncs``) keep deferring.

    The hooks are set in ``forward()``, on tensors in its inputs and outputs. If a unit is entered by
    ``register_fsdp_forward_method``, or returns an object without visible tensors, its gradients still wait in the
    store when the backward ends. The strategy then computes and reduces them.

    Args:
        units: The units; they are sharded already, so that these hooks come after FSDP2's.
        store: The store.
    """

    def __init__(self, units: Units, store: WeightGradStore) -> None:
        self._units = units
        self._store = store
        self._handles = []
        for unit in units.all:
            module: Any = unit.module
            self._handles += [
                module.register_forward_pre_hook(partial(_watch_inputs, partial(self._drain, unit)), with_kwargs=True),
                # In front of FSDP2's own hook: callbacks at the end of a backward run in the order of their queueing.
                module.register_forward_hook(partial(_watch_outputs, self._queue), prepend=True),
            ]

    def _drain(self, unit: Unit, grad: Tensor | None = None) -> None:
        if unit.syncs and len(self._store):
            unit.keep_grad_dtype()
            self._store.flush(unit.params)

    def _queue(self, grad: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._drain_all)

    def _drain_all(self) -> None:
        for unit in self._units.all:
            self._drain(unit)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


@torch.compiler.disable
def _watch_inputs(hook: Callable[[Tensor], None], module: nn.Module, args: Any, kwargs: Any) -> None:
    for tensor in _tensors_with_grad((args, kwargs)):
        tensor.register_hook(hook)


@torch.compiler.disable
def _watch_outputs(hook: Callable[[Tensor], None], module: nn.Module, args: Any, output: Any) -> None:
    for tensor in _tensors_with_grad(output):
        tensor.register_hook(hook)


def _tensors_with_grad(tree: Any) -> Iterator[Tensor]:
    if torch.is_grad_enabled():
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                yield leaf
