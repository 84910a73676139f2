"""DeepSpeed's linear layer with a forward derivative, and without harm to what traces it."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch.func import jvp
from torch.nn import functional

from lightning_zeroplus.engine.gathering.linear import forward_derivatives


@pytest.fixture(autouse=True)
def _upstreams_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "linear", zero3_linear_wrap)


def test_it_has_a_forward_derivative() -> None:
    x, weight, bias = torch.randn(3, 5, 4), torch.randn(2, 4), torch.randn(2)
    tangents = tuple(map(torch.randn_like, (x, weight, bias)))
    with forward_derivatives():
        found = jvp(lambda *args: functional.linear(*args), (x, weight, bias), tangents)
    wanted = jvp(lambda x, weight, bias: x @ weight.t() + bias, (x, weight, bias), tangents)
    torch.testing.assert_close(found, wanted)


def test_it_is_still_traced() -> None:
    x, weight = torch.randn(3, 4), torch.randn(2, 4, requires_grad=True)
    with forward_derivatives():
        found = torch.compile(lambda x: functional.linear(x, weight), backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(found, x @ weight.t())


def test_torchs_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "linear", torchs := torch._C._nn.linear)
    with forward_derivatives():
        assert functional.linear is torchs
    assert functional.linear is torchs
