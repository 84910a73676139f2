"""``no_sync()`` of a module, as the wrapper of DDP has it, and DDP's switch of an engine; no ranks are needed."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zeroplus.engine.windows import HoldsGradients
from lightning_zeroplus.strategy.fsdp2.no_sync import ModuleNoSync


class _Holder:
    is_holding = False

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        self.is_holding = True
        yield
        self.is_holding = False


def test_a_module_has_no_sync_until_it_is_removed() -> None:
    module, holder = nn.Linear(2, 2), _Holder()
    given: Any = ModuleNoSync(module, holder.hold)
    with module.no_sync():  # type: ignore[operator]
        assert holder.is_holding
    assert not holder.is_holding
    given.remove()
    assert not hasattr(module, "no_sync")


def test_a_copy_holds_nothing() -> None:
    module, holder = nn.Linear(2, 2), _Holder()
    ModuleNoSync(module, holder.hold)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with other.no_sync():
            assert not holder.is_holding
        torch.testing.assert_close(other.weight, module.weight)


def test_it_does_nothing_without_its_holder() -> None:
    module, holder = nn.Linear(2, 2), _Holder()
    ModuleNoSync(module, holder.hold)
    del holder
    with module.no_sync():  # type: ignore[operator]
        pass


def test_a_no_sync_of_the_users_stays() -> None:
    class Own(nn.Linear):
        def no_sync(self) -> AbstractContextManager[None]:
            return contextlib.nullcontext()

    module, holder = Own(2, 2), _Holder()
    given: Any = ModuleNoSync(module, holder.hold)
    with module.no_sync():
        assert not holder.is_holding
    given.remove()
    assert "no_sync" not in vars(module)


class _Engine(HoldsGradients):
    def __init__(self) -> None:
        self.gradient_accumulation: Any = SimpleNamespace(holding=False)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.gradient_accumulation.holding = True
        yield
        self.gradient_accumulation.holding = False


def test_the_switch_of_ddp_opens_and_closes_no_sync() -> None:
    engine = _Engine()
    assert engine.require_backward_grad_sync
    for _ in range(2):
        engine.require_backward_grad_sync = False
        assert engine.gradient_accumulation.holding and not engine.require_backward_grad_sync
    engine.require_backward_grad_sync = True
    assert not engine.gradient_accumulation.holding and engine.require_backward_grad_sync


def test_the_switch_is_refused_within_no_sync() -> None:
    engine = _Engine()
    with engine.no_sync():
        engine.require_backward_grad_sync = False  # it is off
        with pytest.raises(RuntimeError, match="inside no_sync.*leave it instead"):
            engine.require_backward_grad_sync = True
        assert engine.gradient_accumulation.holding
