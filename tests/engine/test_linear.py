"""DeepSpeed's linear layer with a forward derivative, and without harm to what traces it."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor
from torch.func import jvp
from torch.nn import functional

from lightning_zeroplus.engine.gathering import linear
from lightning_zeroplus.engine.gathering.linear import forward_derivatives


@pytest.fixture(autouse=True)
def _upstreams_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "linear", zero3_linear_wrap)


def _weight(*shape: int, generator: torch.Generator | None = None) -> Tensor:
    """One that an engine may partition."""
    weight = torch.randn(*shape, generator=generator)
    weight.ds_status, weight.ds_persist = ZeroParamStatus.AVAILABLE, False  # type: ignore[attr-defined]
    return weight


def test_it_has_a_forward_derivative() -> None:
    x, weight, bias = torch.randn(3, 5, 4), _weight(2, 4), torch.randn(2)
    tangents = tuple(map(torch.randn_like, (x, bias)))
    with forward_derivatives():
        found = jvp(lambda x, bias: functional.linear(x, weight, bias), (x, bias), tangents)
    wanted = jvp(lambda x, bias: x @ weight.t() + bias, (x, bias), tangents)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("partitioned", [False, True])
def test_torchs_is_used_for_a_weight_that_is_no_engines(partitioned: bool) -> None:
    x, weight = torch.randn(3, 4), _weight(2, 4) if partitioned else torch.randn(2, 4)
    with forward_derivatives():
        out = functional.linear(x, weight.requires_grad_(), None)
        assert (type(out.grad_fn) is type(torch._C._nn.linear(x, weight).grad_fn)) != partitioned


def test_it_is_still_traced() -> None:
    x, weight = torch.randn(3, 4), _weight(2, 4).requires_grad_()
    with forward_derivatives():
        found = torch.compile(lambda x: functional.linear(x, weight), backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(found, x @ weight.t())


def test_torchs_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "linear", torchs := torch._C._nn.linear)
    with forward_derivatives():
        assert functional.linear is torchs
    assert functional.linear is torchs


def _products(shape: tuple[int, ...], dtype: torch.dtype, bias: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(*shape, 8, generator=generator), _weight(16, 8, generator=generator)
    made = [x, weight, *([torch.randn(16, generator=generator)] if bias else [])]
    leaves = [each.requires_grad_() for each in made]
    with torch.autocast("cpu", dtype, cache_enabled=False):
        out = functional.linear(*leaves)
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4,), (4, 3), ()])
def test_under_autocast_it_rounds_as_torchs(
    shape: tuple[int, ...], dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream's adds the bias to a product that was rounded before, where the input has three dimensions."""
    with forward_derivatives():
        found = _products(shape, dtype, bias)
    monkeypatch.setattr(functional, "linear", torch._C._nn.linear)
    for got, want in zip(found, _products(shape, dtype, bias), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


def _order(autocast: bool) -> list[str]:
    """The order in which the gradients of a layer come."""
    x, weight, bias = torch.randn(4, 8, requires_grad=True), _weight(16, 8), torch.randn(16)
    order: list[str] = []
    for name, leaf in (("weight", weight), ("bias", bias)):
        leaf.requires_grad_().register_hook(lambda grad, name=name: order.append(name))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        functional.linear(x, weight, bias).sum().backward()
    return order


@pytest.mark.skipif(not linear._keeps_apart, reason="this DeepSpeed has one function that computes and keeps")
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_come_in_torchs_order(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with forward_derivatives():
        found = _order(autocast)
    monkeypatch.setattr(functional, "linear", torch._C._nn.linear)
    assert found == _order(autocast)


def test_under_autocast_it_keeps_no_copy_of_the_weight() -> None:
    x, weight = torch.randn(4, 8), _weight(16, 8).requires_grad_()
    kept: list[Tensor] = []
    with (
        forward_derivatives(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each),
    ):
        functional.linear(x, weight)
    assert [each.dtype for each in kept if each.shape == weight.shape] == [torch.float32]


def test_under_autocast_it_is_still_traced() -> None:
    x, weight = torch.randn(3, 4), _weight(2, 4).requires_grad_()
    with forward_derivatives(), torch.autocast("cpu", torch.bfloat16):
        found = torch.compile(lambda x: functional.linear(x, weight), backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(found, x @ weight.t())


def test_torchs_is_there_again_after_the_last_of_several() -> None:
    torchs = torch._C._nn.linear
    with forward_derivatives():
        with forward_derivatives():
            ours = functional.linear
        assert functional.linear is ours is not zero3_linear_wrap
    assert functional.linear is torchs
