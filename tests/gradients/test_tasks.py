"""When a backward is over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_zeroplus.gradients.tasks import at_end_of_backward


class _Scene:
    """Two layers, the second of which a backward within the backward differentiates."""

    def __init__(self) -> None:
        self.first, self.second = (torch.ones(3, requires_grad=True) for _ in range(2))
        self.seen: list[str] = []
        for name in ("first", "second"):
            getattr(self, name).register_post_accumulate_grad_hook(partial(self._note, name))

    def _note(self, name: str, leaf: Tensor) -> None:
        self.seen.append(name)

    def watch(self, leaf: Tensor) -> None:
        leaf.register_hook(lambda grad: at_end_of_backward(lambda: self.seen.append("end")))


def _checkpointed(scene: _Scene) -> Tensor:
    return checkpoint(lambda x: x * scene.second, 2 * scene.first, use_reentrant=True).sum()


def _checkpointed_twice(scene: _Scene) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return checkpoint(lambda x: x * scene.second, 3 * x, use_reentrant=True)

    return checkpoint(inner, 2 * scene.first, use_reentrant=True).sum()


def _by_a_hook(scene: _Scene) -> Tensor:
    def differentiate(grad: Tensor) -> None:
        with torch.enable_grad():
            (scene.second * grad).sum().backward()

    out = 2 * scene.first
    out.register_hook(differentiate)
    return out.sum()


@pytest.mark.parametrize("make_loss", [_checkpointed, _checkpointed_twice, _by_a_hook])
@pytest.mark.parametrize("watched", ["first", "second"])
def test_the_end_is_that_of_the_outermost_backward(make_loss: Callable[[_Scene], Any], watched: str) -> None:
    scene = _Scene()
    scene.watch(getattr(scene, watched))
    make_loss(scene).backward()
    assert scene.seen == ["second", "first", "end"]


def test_a_backward_that_is_not_nested() -> None:
    scene = _Scene()
    scene.watch(scene.second)
    loss = (scene.first * scene.second).sum()
    loss.backward(retain_graph=True)
    assert sorted(scene.seen[:2]) == ["first", "second"] and scene.seen[2:] == ["end"]
    loss.backward()
    assert scene.seen.count("end") == 2
