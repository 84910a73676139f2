"""DeepSpeed's linear layer with a forward derivative, and without harm to what traces it."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch.func import jvp
from torch.nn import functional

from lightning_zeroplus.engine.linear import ForwardDerivative


@pytest.fixture(autouse=True)
def _upstreams_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "linear", zero3_linear_wrap)


def test_it_has_a_forward_derivative() -> None:
    derivative = ForwardDerivative()
    x, weight, bias = torch.randn(3, 5, 4), torch.randn(2, 4), torch.randn(2)
    tangents = tuple(map(torch.randn_like, (x, weight, bias)))
    found = jvp(lambda *args: functional.linear(*args), (x, weight, bias), tangents)
    wanted = jvp(lambda x, weight, bias: x @ weight.t() + bias, (x, weight, bias), tangents)
    derivative.close()
    torch.testing.assert_close(found, wanted)


def test_it_is_still_traced() -> None:
    derivative = ForwardDerivative()
    x, weight = torch.randn(3, 4), torch.randn(2, 4, requires_grad=True)
    found = torch.compile(lambda x: functional.linear(x, weight), backend="eager", fullgraph=True)(x)
    derivative.close()
    torch.testing.assert_close(found, x @ weight.t())


def test_the_last_engine_that_is_closed_gives_back_upstreams() -> None:
    first, second = ForwardDerivative(), ForwardDerivative()
    first.close()
    first.close()
    assert functional.linear is not zero3_linear_wrap
    second.close()
    assert functional.linear is zero3_linear_wrap


def test_torchs_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "linear", torchs := torch._C._nn.linear)
    derivative = ForwardDerivative()
    assert functional.linear is torchs
    derivative.close()
    assert functional.linear is torchs
