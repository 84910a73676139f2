"""Gradients that autograd does not accumulate: from compiled graphs, or computed by hand in a backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zeroplus.gradients.dtype import normalized


class ReceivesGradients:
    """The side of a gradient accumulation that such gradients are handed to."""

    params: list[nn.Parameter]

    def receive(self, index: int, grad: Tensor) -> None:
        """Take a gradient that autograd does not accumulate: from a compiled graph, or computed by hand in a backward.

        It goes where autograd's would: through the parameter's tensor hooks, into ``param.grad`` in the dtype that the
        parameter expects, and on to upstream's gradient hook.

        Args:
            index: Which parameter, in the order of ``module.parameters()``.
            grad: This rank's full gradient, or a summand of it, in the parameter's shape. It is copied where it is not
                used up at once.
        """
        param = self.params[index]
        for hook in list((param._backward_hooks or {}).values()):
            replaced = hook(grad)
            grad = grad if replaced is None else replaced
        grad = normalized(grad.detach(), param)
        with self.full_shape(param):
            if param.grad is None:
                param.grad = grad.clone() if grad._base is not None or self._outlives_hook(index, param) else grad
            else:
                param.grad = param.grad + grad
        self.gradient_hook(param)

    def _outlives_hook(self, index: int, param: nn.Parameter) -> bool:
        """Whether the gradient itself, and not a copy in a bucket, waits after :meth:`gradient_hook`."""
        return True

    def gradient_hook(self, param: nn.Parameter) -> None:
        """What upstream does when autograd has accumulated a parameter's gradient."""

    @contextmanager
    def full_shape(self, param: nn.Parameter) -> Iterator[None]:
        """Let a parameter take a gradient, although it may be partitioned."""
        yield

    def index_by_id(self, id_: int) -> int:
        """The index of the parameter that DeepCompile calls ``id_``."""
        raise NotImplementedError


class TakesWholeGradients(ReceivesGradients):
    """The same at stage 3, where a parameter may be partitioned when its gradient comes.

    Autograd accumulates in the shape that a parameter has, and the node that does it accepts the shape that the
    parameter had when the node was made. Both are the whole parameter's here. A function needs it that has got
    parameters as its arguments and differentiates in a backward of its own, as checkpointing by hand does.
    """

    index: dict[int, int]
    _arriving: set[int]

    def take_whole_gradients(self) -> None:
        """Accept them from now on, from autograd and from ``param.receive_gradient``."""
        self._partitions: dict[int, Tensor] = {}
        self._nodes = []  # kept, or autograd would make others
        for index, param in enumerate(self.params):
            if param.requires_grad:
                param.receive_gradient = partial(self.receive, index)  # type: ignore[attr-defined]
                with torch.enable_grad(), self.full_shape(param):
                    self._nodes.append(param.view_as(param).grad_fn.next_functions[0][0])  # type: ignore[union-attr]

    def leave_whole_gradients(self) -> None:
        """Undo :meth:`take_whole_gradients`."""
        self._nodes.clear()
        for param in self.params:
            vars(param).pop("receive_gradient", None)

    def _before_accumulate(self, index: int, grad: Tensor | None) -> None:
        super()._before_accumulate(index, grad)  # type: ignore[misc]
        param: Any = self.params[index]
        if param.shape != param.ds_shape and index in self._arriving:
            self._partitions[index] = param.data
            param.data = _placeholder(param)

    def accumulated(self, param: nn.Parameter) -> None:
        """Autograd has accumulated a gradient: a partitioned parameter is what it was before."""
        if self._partitions and self.index[id(param)] in self._partitions:
            param.data = self._partitions.pop(self.index[id(param)])

    @contextmanager
    def full_shape(self, param: Any) -> Iterator[None]:
        if param.shape == param.ds_shape:
            yield
            return
        partitioned = param.data
        param.data = _placeholder(param)
        try:
            yield
        finally:
            param.data = partitioned


def _placeholder(param: Any) -> Tensor:
    """In the shape of the whole parameter, without memory."""
    return torch.empty((), dtype=param.dtype, device=param.device).expand(param.ds_shape)
