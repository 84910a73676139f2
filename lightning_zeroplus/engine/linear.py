"""A forward derivative for the linear layer that DeepSpeed puts in the place of torch's at ZeRO stage 3."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from torch import Tensor

_Linear: Any = LinearFunctionForZeroStage3
_setup_context = _Linear.setup_context
# DeepSpeed before 0.19 saves its tensors in ``forward()``. Such a function cannot be transformed at all; torch says so.
_can_be_transformed = "setup_context" in vars(_Linear)


class ForwardDerivative:
    """Gives upstream's function one, from when it is made until :meth:`close`; as long as anyone needs it.

    Upstream's function is left alone where ``torch.func`` cannot transform it.
    """

    _users = 0

    def __init__(self) -> None:
        self._is_open = _can_be_transformed
        if not self._is_open:
            return
        ForwardDerivative._users += 1
        _Linear.setup_context, _Linear.jvp = staticmethod(_save), staticmethod(_jvp)

    def close(self) -> None:
        """Leave the function as it was, unless others need it. May be called again."""
        if self._is_open:
            self._is_open = False
            ForwardDerivative._users -= 1
            if not ForwardDerivative._users:
                _Linear.setup_context = staticmethod(_setup_context)
                del _Linear.jvp


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    _setup_context(ctx, inputs, output)
    ctx.save_for_forward(*inputs)


def _jvp(ctx: Any, x_tangent: Tensor | None, weight_tangent: Tensor | None, bias_tangent: Any = None) -> Tensor | None:
    """``y = x W^T + b``: ``dy = dx W^T + x dW^T + db``; ``[..., in] -> [..., out]``."""
    x, weight = ctx.saved_tensors[:2]
    parts = []
    if x_tangent is not None:
        parts.append(x_tangent @ weight.t())
    if weight_tangent is not None:
        parts.append(x @ weight_tangent.t())
    if bias_tangent is not None:
        parts.append(bias_tangent.expand(*x.shape[:-1], -1))
    return sum(parts[1:], start=parts[0]) if parts else None
