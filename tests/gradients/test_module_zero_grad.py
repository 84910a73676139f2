"""A module whose ``zero_grad()`` drops gradients elsewhere, and its copies, which have nothing to do with them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import torch
from torch import nn

from lightning_zeroplus.gradients.module_zero_grad import ModuleZeroGrad


class Owner:
    """Counts how often it drops."""

    def __init__(self) -> None:
        self.dropped = 0

    def drop(self, set_to_none: bool) -> None:
        self.dropped += 1


class Overrides(nn.Linear):
    """A user's own ``zero_grad``."""

    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


def _module() -> Overrides:
    module = Overrides(2, 2)
    module(torch.ones(2)).sum().backward()
    return module


def test_drops_and_does_what_the_class_does() -> None:
    module, owner = _module(), Owner()
    route = ModuleZeroGrad(module, owner.drop)
    module.zero_grad(set_to_none=False)
    assert (owner.dropped, module.calls) == (1, 1)
    assert module.weight.grad is not None and not module.weight.grad.any()
    module.zero_grad()
    assert owner.dropped == 2 and module.weight.grad is None
    route.remove()
    module.zero_grad()
    assert (owner.dropped, module.calls) == (2, 3) and "zero_grad" not in vars(module)


def test_a_copy_zeroes_its_own_gradients_only() -> None:
    for duplicate in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        module, owner = _module(), Owner()
        ModuleZeroGrad(module, owner.drop)
        other = duplicate(module)
        other(torch.ones(2)).sum().backward()
        other.zero_grad()
        assert owner.dropped == 0 and other.weight.grad is None and module.weight.grad is not None


def test_it_keeps_neither_alive() -> None:
    module, owner = _module(), Owner()
    ModuleZeroGrad(module, owner.drop)
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    module.zero_grad()
    assert module.weight.grad is None
    gone_module = weakref.ref(module)
    del module
    gc.collect()
    assert gone_module() is None
