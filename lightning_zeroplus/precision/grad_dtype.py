"""The dtype that a parameter's gradient is to have, after PyTorch's contract for leaves.

``Tensor.grad_dtype`` of a leaf says which dtype autograd accumulates in: by default the leaf's own; another if it was
set; any, that of the gradient itself, if it is None. Gradients that autograd does not accumulate, such as those that
compiled graphs produce, follow the same rule here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def supports_grad_dtype() -> bool:
    """Whether this torch has ``Tensor.grad_dtype``; without it a gradient has its parameter's dtype."""
    return hasattr(Tensor, "grad_dtype")


def expected_grad_dtype(param: Tensor) -> torch.dtype | None:
    """The dtype that the gradient of ``param`` is to have; None: that in which it comes."""
    return param.grad_dtype if supports_grad_dtype() else param.dtype


def normalized(grad: Tensor, param: Tensor) -> Tensor:
    """``grad`` in the dtype that ``param`` expects.

    Args:
        grad: A gradient of any float dtype; any shape.
        param: Its leaf.
    """
    dtype = expected_grad_dtype(param)
    return grad if dtype is None else grad.to(dtype)
