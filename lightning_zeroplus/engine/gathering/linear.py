"""The linear layer that DeepSpeed puts in the place of torch's at ZeRO stage 3: forward derivatives, and autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3, zero3_linear_wrap
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor
from torch.nn import functional

from lightning_zeroplus.gradients.patches.replacement import Replacement
from lightning_zeroplus.gradients.patches.transforms import has_duals

_torchs = torch._C._nn.linear
_THERE = ZeroParamStatus.AVAILABLE
_may_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


#: From DeepSpeed 0.19 on. Before, one function computes, and keeps what the backward needs.
_keeps_apart = "setup_context" in vars(LinearFunctionForZeroStage3)
#: Upstream's backward reads whether there is a bias, and not the bias.
_IS_THERE = torch.empty(0)


class _Turned:
    """The context of a function whose arguments are in another order, for upstream's backward."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        bias, input, weight = ctx.needs_input_grad
        self.needs_input_grad = input, weight, bias

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Linear(LinearFunctionForZeroStage3):
    """Upstream's function, which does not keep the bias: as under DDP, it may be written to before the backward.

    The bias comes first, for autograd to bring its gradient first, as with torch's function: a hook of the weight may
    look at the bias, or drop all gradients that have come.
    """

    @staticmethod
    def forward(bias: Tensor | None, input: Tensor, weight: Tensor) -> Any:
        return LinearFunctionForZeroStage3.forward(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        bias, input, weight = inputs
        super(_Linear, _Linear).setup_context(ctx, (input, weight, None if bias is None else _IS_THERE), output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad_input, grad_weight, grad_bias = LinearFunctionForZeroStage3.backward(_Turned(ctx), grad_output)
        return grad_bias, grad_input, grad_weight


class _UnderAutocast(LinearFunctionForZeroStage3):
    """Upstream's backward, which reads the weight itself and no 16-bit copy of it, with torch's forward.

    Upstream's forward adds the bias to a product that was rounded to 16 bits before.
    """

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _torchs(input, weight, bias)


class _UnderAutocastInOne(LinearFunctionForZeroStage3):
    """The same where upstream's forward keeps what the backward needs: it is called for that alone."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        LinearFunctionForZeroStage3.forward(ctx, input, weight, bias)
        return _torchs(input, weight, bias)


def _cast(tensor: Tensor) -> Tensor:
    """As autocast does, for autograd to see it: the gradient that comes back has 16 bits, too."""
    casts = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(tensor.device.type)) if casts else tensor


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Upstream's function has no forward derivative. Where one is asked for, torch's is used.

    Upstream's is not given one, because ``torch.compile`` does not trace a function that has one.

    Torch's is used for small weights, too. It keeps a view of the weight for its backward, which would keep a large one
    in memory. But autocast would keep a copy of the weight, which a step within does not update. And it is used for
    what the engine does not partition: the weights of other modules, and what is computed from a weight.
    """
    is_compiling = torch.compiler.is_compiling()
    if (not is_compiling and _stays_whole(weight)) or has_duals():
        return _torchs(input, weight, bias)
    if not input.is_meta and torch.is_autocast_enabled(input.device.type):
        function = _UnderAutocast if _keeps_apart else _UnderAutocastInOne
        return function.apply(_cast(input), weight, None if bias is None else _cast(bias))
    if is_compiling or not _keeps_apart:
        return zero3_linear_wrap(input, weight, bias)
    return _Linear.apply(bias, input, weight)


def _stays_whole(weight: Any) -> bool:
    status = getattr(weight, "ds_status", None)
    if status is None:
        return True  # no engine's
    if status is not _THERE or not weight.ds_persist:
        return False
    return not (_may_autocast() and torch.is_autocast_enabled(weight.device.type))


_replacement = Replacement(functional, "linear", _linear)


@contextmanager
def forward_derivatives() -> Iterator[None]:
    """Within, in the whole process, upstream's linear layer has forward derivatives. Torch's own is left alone.

    After the last one torch's is there again: upstream leaves its own, which other fits of the process would use.
    """
    is_upstreams = functional.linear in (zero3_linear_wrap, _linear)
    try:
        with _replacement() if is_upstreams else nullcontext():
            yield
    finally:
        if is_upstreams and functional.linear is zero3_linear_wrap:
            functional.linear = _torchs
