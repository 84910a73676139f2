"""The backwards of a cached loss share one reduction, under every strategy that can wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel


@contextlib.contextmanager
def one_reduction(module: Any) -> Iterator[None]:
    """Reduce the gradients of all backwards within once, at the end, unless the user's window does."""
    strategy = module.trainer.strategy
    if hasattr(strategy, "coalesce") and not strategy.window.is_open:
        with strategy.coalesce():
            yield
    elif isinstance(strategy.model, DistributedDataParallel) and strategy.model.require_backward_grad_sync:
        with strategy.model.no_sync():
            yield
        _reduce(module, strategy.model)
    else:
        yield


def _reduce(module: Any, model: nn.Module) -> None:
    """Let DDP reduce the gradients that wait, by a backward that adds zero to all of them.

    No chunk's backward could do it: DDP reduces in a backward that reaches all parameters with a gradient, and a
    chunk reaches those of one column.
    """
    waiting = [param for param in model.parameters() if param.requires_grad and param.grad is not None]
    if waiting:
        module.manual_backward(_Reached.apply(*waiting))


class _Reached(torch.autograd.Function):
    """Zero, which depends on all parameters."""

    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> Tensor:
        ctx.params = params
        return params[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(_zero_for(param) for param in ctx.params)


def _zero_for(param: Tensor) -> Tensor:
    assert param.grad is not None
    # As sparse as the gradient is: a dense zero would make it dense. Else of the memory of one element.
    return torch.zeros_like(param.grad) if param.grad.is_sparse else param.grad.new_zeros(()).expand_as(param)
