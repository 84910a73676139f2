"""Hooks of a torch optimizer around the step of an engine; tests/programs/families/step_hooks.py has whole fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zeroplus.gradients.patches.step_hooks import users_step_hooks
from lightning_zeroplus.precision.zero import ZeroPlusPrecision


class _Engine:
    """Steps as an engine does: by the torch optimizer, without a closure."""

    def __init__(self, overflow: bool = False) -> None:
        self.calls: list[str] = []
        self.basic_optimizer: Any = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
        self.basic_optimizer.gradient_accumulation = None  # it is the engine's
        self.basic_optimizer.register_step_pre_hook(lambda *_: self.calls.append("before"))
        self.basic_optimizer.register_step_post_hook(lambda *_: self.calls.append("after"))
        self.optimizer = SimpleNamespace(overflow=overflow)

    def step(self, **unused: Any) -> None:
        self.calls.append("step")
        if not self.optimizer.overflow:
            self.basic_optimizer.step()


@pytest.mark.parametrize(
    ("precision", "calls"),
    [
        ("32-true", ["before", "closure", "step", "after"]),
        ("bf16-mixed", ["before", "closure", "step", "after"]),
        ("16-mixed", ["closure", "before", "step", "after"]),
    ],
)
def test_the_order_is_that_of_lightnings_own_plugins(precision: Any, calls: list[str]) -> None:
    engine = _Engine()
    plugin = ZeroPlusPrecision(precision)
    plugin._after_closure = lambda *_: None  # type: ignore[method-assign,assignment]
    model: Any = SimpleNamespace(trainer=SimpleNamespace(model=engine))
    plugin.optimizer_step(engine.basic_optimizer, model, lambda: engine.calls.append("closure"))
    assert engine.calls == calls


def test_a_step_that_is_skipped_has_no_hook_after_it() -> None:
    engine = _Engine(overflow=True)
    with users_step_hooks(engine, None, engine.optimizer, None):
        engine.step()
    assert engine.calls == ["before", "step"]


def test_hooks_are_given_what_users_see_and_stay_registered() -> None:
    engine, shown = _Engine(), object()
    given: list[Any] = []
    engine.basic_optimizer.register_step_pre_hook(lambda *each: given.append(each))
    handle = engine.basic_optimizer.register_step_post_hook(lambda *each: (given.append(each), handle.remove())[0])
    for _ in range(2):
        with users_step_hooks(engine, None, shown, print):
            engine.step()
    assert given == [(shown, (shown,), {"closure": print})] * 3
    assert engine.calls == ["before", "step", "after"] * 2


def test_hooks_stay_registered_when_a_step_raises() -> None:
    engine = _Engine()
    with pytest.raises(KeyError), users_step_hooks(engine, None, engine.optimizer, None):
        raise KeyError
    engine.basic_optimizer.step()
    assert engine.calls == ["before", "before", "after"]


def test_other_arguments_for_the_step_are_refused() -> None:
    engine = _Engine()
    engine.basic_optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: (args, kwargs))
    with pytest.raises(RuntimeError, match=r"register_step_pre_hook.*Let the hook return None"):
        with users_step_hooks(engine, None, engine.optimizer, None):
            engine.step()
    assert engine.calls == ["before"]
