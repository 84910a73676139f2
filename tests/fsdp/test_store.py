"""WeightGradStore: order, bounds, choice, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zeroplus.weight_grads.linear import DeferredLinear
from lightning_zeroplus.weight_grads.store import WeightGradStore


def _put(store: WeightGradStore, param: nn.Parameter, value: float, log: list[float], **kwargs: Any) -> Tensor:
    operand = torch.full(param.shape, value)

    def compute(operand: Tensor) -> Tensor:
        log.append(value)
        return operand

    store.put(param, compute, operand, **kwargs)
    return operand


def test_flush_computes_in_order_and_accumulates() -> None:
    store, log, param = WeightGradStore(), [], nn.Parameter(torch.zeros(4))
    for value in (1.0, 2.0, 3.0):
        _put(store, param, value, log)
    assert len(store) == 3 and log == [] and store.nbytes == 3 * 16
    assert store.flush() == 3 and log == [1.0, 2.0, 3.0]
    assert torch.equal(param.grad, torch.full((4,), 6.0))
    assert store.flush() == 0 and store.nbytes == 0


def test_flush_of_a_module_or_of_parameters() -> None:
    store, log = WeightGradStore(), []
    inside, outside = nn.Linear(2, 2), nn.Linear(2, 2)
    replaced = nn.Parameter(torch.zeros(2, 2))
    _put(store, outside.weight, 1.0, log)
    _put(store, inside.weight, 2.0, log)
    _put(store, replaced, 3.0, log, owner=inside)
    assert store.flush(nn.Sequential(inside)) == 2 and log == [2.0, 3.0]
    assert store.flush([outside.weight]) == 1 and outside.weight.grad is not None


def test_what_waits_for_some_parameters_can_be_dropped() -> None:
    store, log = WeightGradStore(), []
    kept, dropped = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(8))
    for param in (kept, dropped, kept):
        _put(store, param, float(len(store)), log)
    store.clear([dropped])
    assert (len(store), store.nbytes) == (2, 2 * 16)
    assert store.flush() == 2 and log == [0.0, 2.0] and dropped.grad is None
    assert store.nbytes == 0


def test_over_budget_the_oldest_is_computed() -> None:
    store, log, param = WeightGradStore(max_bytes=32), [], nn.Parameter(torch.zeros(4))
    for value in (1.0, 2.0, 3.0):
        _put(store, param, value, log)
        assert store.nbytes <= 32
    assert log == [1.0] and len(store) == 2
    store.put(param, lambda operand: operand[:4], torch.zeros(100))  # larger than the budget by itself
    assert log == [1.0, 2.0, 3.0] and len(store) == 0


def test_a_storage_counts_once_and_whole() -> None:
    store, param, shared = WeightGradStore(), nn.Parameter(torch.zeros(2)), torch.zeros(100)
    store.put(param, lambda a, b: a + b, shared[:2], shared[2:4])
    store.put(param, lambda a: a, shared[:2])
    assert store.nbytes == 400
    store.flush([param])
    assert store.nbytes == 0


def test_hooks_and_grad_dtype_are_autograds() -> None:
    store, seen = WeightGradStore(), []
    layer = DeferredLinear(4, 4, dtype=torch.bfloat16, store=store)
    layer.weight.grad_dtype = torch.float32
    layer.weight.register_hook(lambda grad: seen.append(grad.dtype) or 2 * grad)
    layer.weight.register_post_accumulate_grad_hook(lambda param: seen.append("accumulated"))
    with store.defer():
        layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    store.flush()
    assert seen == [torch.float32, "accumulated"] and layer.weight.grad.dtype == torch.float32
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 2.0))


def test_a_step_over_waiting_gradients_raises_and_changes_nothing() -> None:
    store, param = WeightGradStore(), nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([param], 1.0)
    handle = store.watch(optimizer)
    _put(store, param, 1.0, [])
    with pytest.raises(RuntimeError, match=r"1 weight gradients .* wait"):
        optimizer.step()
    assert not param.any()
    store.flush()
    optimizer.step()
    assert torch.equal(param.detach(), -torch.ones(4))
    handle.remove()
    _put(store, param, 1.0, [])
    optimizer.step()


def test_exceptions_drop_what_waits() -> None:
    store, param = WeightGradStore(), nn.Parameter(torch.zeros(4))
    with pytest.raises(ZeroDivisionError), store.defer():
        _put(store, param, 1.0, [])
        raise ZeroDivisionError
    assert len(store) == 0 and store.nbytes == 0 and not store.deferring
    _put(store, param, 1.0, [])
    store.put(param, lambda: 1 / 0)
    _put(store, param, 1.0, [])
    with pytest.raises(ZeroDivisionError):
        store.flush()
    assert len(store) == 0 and store.nbytes == 0
    store.clear()


@pytest.mark.parametrize("max_bytes", [0, -1, 1.5, True])
def test_bad_budgets(max_bytes: Any) -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        WeightGradStore(max_bytes)
