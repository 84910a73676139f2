"""DeferredLinear and DeferredGroupedLinear against nn.Linear under autograd, to the bit, in one process."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zeroplus.weight_grads.convert import defer_weight_grads, give_store
from lightning_zeroplus.weight_grads.grouped import DeferredGroupedLinear
from lightning_zeroplus.weight_grads.linear import DeferredLinear
from lightning_zeroplus.weight_grads.store import WeightGradStore


class Net(nn.Module):
    def __init__(self, checkpointing: str = "none", bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8, bias)
        self.middle = nn.Sequential(nn.Linear(8, 8, bias), nn.Tanh(), nn.Linear(8, 8, bias))
        self.last = nn.Linear(8, 3, bias)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.checkpointing == "none":
            x = self.middle(x)
        else:
            x = checkpoint(self.middle, x, use_reentrant=self.checkpointing == "reentrant")
        return self.last(x)


def _gradients(net: nn.Module, x: Tensor, autocast: bool = False, repeat: int = 1) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    for _ in range(repeat):  # bf16 sums are those of one backward after the other
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = net(leaf).float().square().mean()
        loss.backward()
    return [leaf.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


def _assert_deferring_is_exact(make: Callable[[], nn.Module], x: Tensor, **kwargs: Any) -> WeightGradStore:
    plain, ours, store = make(), make(), WeightGradStore()
    names = defer_weight_grads(ours, store=store)
    with store.defer():
        immediate = _gradients(ours, x, **kwargs)
    weights = [ours.get_submodule(name).weight for name in names]
    assert all(weight.grad is None for weight in weights)
    assert len(store) == len(names) * kwargs.get("repeat", 1) == 4 * kwargs.get("repeat", 1)
    assert store.flush() == len(names) * kwargs.get("repeat", 1) and store.nbytes == 0
    got = [immediate[0], *(p.grad for p in ours.parameters())]
    for one, other in zip(got, _gradients(plain, x, **kwargs), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    return store


@settings(deadline=None, max_examples=30)
@given(
    shape=st.lists(st.integers(1, 4), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    bias=st.booleans(),
    repeat=st.integers(1, 3),
)
def test_equals_linear_for_all_shapes(shape: list[int], dtype: torch.dtype, bias: bool, repeat: int) -> None:
    x = torch.randn(*shape, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    _assert_deferring_is_exact(lambda: Net(bias=bias).to(dtype), x, repeat=repeat)


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("autocast", [False, True])
def test_under_activation_checkpointing_and_autocast(checkpointing: str, autocast: bool) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    _assert_deferring_is_exact(lambda: Net(checkpointing), x, autocast=autocast)


def test_autocast_without_checkpointing() -> None:
    _assert_deferring_is_exact(Net, torch.randn(5, 6, generator=torch.Generator().manual_seed(1)), autocast=True)


def test_a_compiled_model_breaks_its_graph_and_defers() -> None:
    torch._dynamo.reset()
    compiled: list[Any] = []

    def make() -> nn.Module:
        net = Net()
        net.compile(backend=_CountingBackend(compiled))
        return net

    _assert_deferring_is_exact(make, torch.randn(5, 6, generator=torch.Generator().manual_seed(1)))
    assert len(compiled) > 1
    store = WeightGradStore()
    net = Net()
    defer_weight_grads(net, store=store)
    with store.defer(), pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        torch.compile(net, backend="eager", fullgraph=True)(torch.randn(5, 6))


class _CountingBackend:
    def __init__(self, graphs: list[Any]) -> None:
        self._graphs = graphs

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self._graphs.append(graph)
        return graph.forward


def test_what_cannot_wait_has_its_gradient_at_once() -> None:
    store = WeightGradStore()
    net = nn.ModuleDict({name: DeferredLinear(4, 4, store=store) for name in ("frozen", "weight_norm", "outside")})
    net["frozen"].weight.requires_grad_(False)
    torch.nn.utils.parametrizations.weight_norm(net["weight_norm"])
    x = torch.randn(2, 4)
    with store.defer():
        (net["frozen"](x) + net["weight_norm"](x)).sum().backward()
    net["outside"](x).sum().backward()
    assert len(store) == 0
    assert net["frozen"].weight.grad is None and net["frozen"].bias.grad is not None
    assert all(p.grad is not None for name in ("weight_norm", "outside") for p in net[name].parameters())
    with store.defer(), torch.no_grad():
        net["outside"](x)


def test_a_first_layer_without_bias_has_a_backward() -> None:
    store = WeightGradStore()
    layer = DeferredLinear(4, 3, bias=False, store=store)
    x = torch.randn(2, 4)
    with store.defer():
        layer(x).sum().backward()
    assert store.flush() == 1 and torch.equal(layer.weight.grad, torch.ones(2, 3).t() @ x)


def test_no_second_derivative() -> None:
    store = WeightGradStore()
    layer = DeferredLinear(4, 4, store=store)
    x = torch.randn(2, 4, requires_grad=True)
    with store.defer():
        (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(sum),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias=st.booleans(),
    autocast=st.booleans(),
)
def test_grouped_equals_one_linear_per_expert(sizes: list[int], dtype: torch.dtype, bias: bool, autocast: bool) -> None:
    torch.manual_seed(0)
    store = WeightGradStore()
    grouped = DeferredGroupedLinear(len(sizes), 4, 3, bias, dtype=dtype, store=store)
    counts, x = torch.tensor(sizes), torch.randn(sum(sizes), 4, dtype=dtype)
    context = partial(torch.autocast, "cpu", torch.bfloat16) if autocast else nullcontext
    leaf, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    with store.defer():
        with context():
            y = grouped(leaf, counts)
        y.float().square().sum().backward()
    assert grouped.weight.grad is None and store.flush(grouped) == 1
    starts = list(itertools.accumulate(sizes, initial=0))
    for expert, (start, end) in enumerate(itertools.pairwise(starts)):
        linear = nn.Linear(4, 3, bias, dtype=dtype)
        with torch.no_grad():
            linear.weight.copy_(grouped.weight[expert])
            if bias:
                linear.bias.copy_(grouped.bias[expert])
        if start == end:
            assert not grouped.weight.grad[expert].any()
            continue
        with context():
            part = linear(reference[start:end])
        assert torch.equal(part, y[start:end])
        part.float().square().sum().backward()
        assert torch.equal(linear.weight.grad, grouped.weight.grad[expert])
        assert not bias or torch.equal(linear.bias.grad, grouped.bias.grad[expert])
    assert torch.equal(leaf.grad, reference.grad)


def test_grouped_refuses_counts_that_do_not_fit() -> None:
    layer = DeferredGroupedLinear(2, 4, 3)
    for counts in ([1, 1, 1], [2, 2], [4, -1]):
        with pytest.raises(ValueError, match="counts"):
            layer(torch.randn(3, 4), torch.tensor(counts))


def test_conversion_keeps_modules_and_state() -> None:
    net = Net()
    before, state = dict(net.named_modules()), net.state_dict()
    assert defer_weight_grads(net, "middle.*") == ["middle.0", "middle.2"]
    assert dict(net.named_modules()) == before and net.state_dict().keys() == state.keys()
    assert type(net.first) is nn.Linear and type(net.middle[0]) is DeferredLinear
    store = WeightGradStore()
    assert give_store(net, store) == 2 and give_store(net, WeightGradStore()) == 0
    assert defer_weight_grads(net, ["first"], store=store) == ["first"] and net.first.store is store
    with pytest.raises(ValueError, match="'head' matches no"):
        defer_weight_grads(net, ["last", "head"])
    assert type(net.last) is nn.Linear


def test_a_copied_module_does_not_share_the_store() -> None:
    store = WeightGradStore(max_bytes=100)
    layer = DeferredLinear(4, 4, store=store)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with store.defer():
            copied(torch.randn(2, 4)).sum().backward()
        assert copied.store is not store and copied.store.max_bytes == 100
        assert copied.weight.grad is not None and len(store) == 0
