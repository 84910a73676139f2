"""Gradients that autograd does not accumulate: from compiled graphs, or computed by hand in a backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_zeroplus.precision.grad_dtype import normalized


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
