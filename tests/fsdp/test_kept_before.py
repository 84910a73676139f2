"""Tensors that share a weight's memory before the module is sharded: which follow, and what the others say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zeroplus.fsdp.whole.layout import BEFORE
from lightning_zeroplus.strategy.fsdp2.originals import find_kept


def note_kept(net: nn.Module) -> None:
    find_kept(net).take_leave()


def _followers(param: nn.Parameter) -> list[Any]:
    _, kept, _ = vars(param).pop(BEFORE, (None, [], False))
    return kept


def test_plain_tensors_of_one_weight_follow() -> None:
    net = nn.Linear(4, 3)
    kept = [net.weight.data, net.weight.detach()[1], net.weight.detach().t()]
    note_kept(net)
    followers = _followers(net.weight)
    assert {id(each) for each in followers} >= {id(each) for each in kept}
    assert not _followers(net.bias)


def test_nothing_is_looked_for_where_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.get_objects", lambda: pytest.fail("looked"))
    net = nn.Linear(4, 3)
    net.register_buffer("mean", net.bias.data.clone())
    note_kept(net)


def test_a_buffer_with_the_memory_of_a_weight_follows_it() -> None:
    net = nn.Linear(4, 3)
    net.register_buffer("same", net.bias.data)
    note_kept(net)
    assert [id(each) for each in _followers(net.bias)] == [id(net.same)]


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: nn.Parameter(weight.data),
        lambda weight: weight.view(-1),
        lambda weight: weight.data.view(torch.int32),
    ],
)
def test_what_cannot_follow_says_so_when_it_is_used(make: Any) -> None:
    net = nn.Linear(4, 3)
    other = make(net.weight)
    note_kept(net)
    assert not _followers(net.weight)
    assert other.numel() == 12
    for use in (lambda: other + 1, lambda: other.data, lambda: other.detach(), lambda: other.tolist()):
        with pytest.raises(RuntimeError, match="shares the memory of the weight 'weight'"):
            use()


def test_a_tensor_of_several_weights_cannot_follow() -> None:
    flat = torch.zeros(15)
    net = nn.Linear(4, 3)
    net.weight.data, net.bias.data = flat[:12].view(3, 4), flat[12:]
    note_kept(net)
    with pytest.raises(RuntimeError, match="shares the memory"):
        flat.sum()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_part_of_one_of_several_weights_follows_it(name: str) -> None:
    flat = torch.zeros(15)
    net = nn.Linear(4, 3)
    net.weight.data, net.bias.data = flat[:12].view(3, 4), flat[12:]
    kept = net.get_parameter(name).data[1:]
    del flat
    note_kept(net)
    assert any(each is kept for each in _followers(net.get_parameter(name)))
    assert kept.sum() == 0


def test_nothing_is_changed_before_the_module_is_sharded() -> None:
    net = nn.Linear(4, 3)
    kept, other = net.weight.data, net.weight.view(-1)
    find_kept(net)
    assert type(kept) is type(other) is torch.Tensor
    assert BEFORE not in vars(net.weight)


def test_the_graph_of_an_output_is_no_tensor_of_a_user() -> None:
    net = nn.Linear(4, 3)
    out = net(torch.ones(2, 4, requires_grad=True))
    note_kept(net)
    assert out.grad_fn is not None
    out.sum().backward()
