"""Drain: a unit's deferred weight gradients are computed before the unit is reduced."""

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
    """Lets every unit that reduces take its gradients from a store first.

    FSDP2 reduces a unit when the gradient of its input has been computed, and what is left at the end of the backward.
    A gradient that comes later is added to the next step's, silently. So the store is flushed for the unit by a hook
    on the same input, which runs before FSDP2's, and for all units at the end of the backward, also before FSDP2.
    Units that do not reduce in this backward (``Unit.syncs``) keep deferring.

    The hooks are those of ``forward()``, and they need tensors to hang on: for a unit that is entered by
    ``register_fsdp_forward_method``, or that returns an object of its own, the gradients wait in the store still when
    the backward ends. The strategy computes and reduces them then.

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
            self._store.flush(unit.params)
            unit.cast_late_grads()

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
