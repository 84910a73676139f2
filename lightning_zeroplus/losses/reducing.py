"""The backwards of a cached loss share one reduction, under every strategy that can wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel


def check_reduction(module: Any) -> None:
    """Refuse what cannot reduce once.

    Raises:
        MisconfigurationException: Under DDP with ``static_graph=True``, which counts on one backward in each step.
    """
    if getattr(module, "_trainer", None) is None or not _reduces_by_ddp(module):
        return
    if module.trainer.strategy.model.static_graph:
        raise MisconfigurationException(
            "`CachedLoss` runs several backwards and reduces once, which DDP with `static_graph=True` cannot do: use"
            " `DDPStrategy(static_graph=False)`, and `find_unused_parameters=True` if some parameters get no gradient."
        )


def _reduces_by_ddp(module: Any) -> bool:
    model = getattr(module.trainer.strategy, "model", None)
    return isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync


@contextlib.contextmanager
def one_reduction(module: Any) -> Iterator[None]:
    """Reduce the gradients of all backwards within once, at the end, unless the user's window does."""
    strategy = module.trainer.strategy
    if hasattr(strategy, "coalesce") and not strategy.window.is_open:
        with strategy.coalesce():
            yield
    elif _reduces_by_ddp(module):
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
