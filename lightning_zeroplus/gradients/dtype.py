"""The dtype that a parameter's gradient should have, by PyTorch's rule for leaves.

``Tensor.grad_dtype`` of a leaf is the dtype in which autograd accumulates. By default it is the leaf's own dtype; None
keeps the dtype of the incoming gradient. Gradients that autograd does not accumulate, such as the gradients of compiled
graphs, follow the same rule here.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

#: The dtypes that a user may choose for gradients, by increasing range: ranks that differ agree on the later one.
GRAD_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

#: Marks a parameter whose ``grad_dtype`` was set by an engine, and not by the user.
_SET_BY_ENGINE = "grad_dtype_is_set_by_engine"


def expected_grad_dtype(param: Tensor) -> torch.dtype | None:
    """The dtype that the gradient of ``param`` should have; None: the dtype of the incoming gradient."""
    return param.grad_dtype


def check_assigned(grad: Tensor, param: Tensor) -> None:
    """Refuse a tensor that torch would not take for ``param.grad``.

    A parameter in fp16 or bf16 may have it in fp32: in that ``param.grad`` is shown where gradients are summed in fp32.

    Args:
        grad: The tensor that is assigned.
        param: The parameter, which may be partitioned.

    Raises:
        RuntimeError: If its shape or dtype is not that of the parameter. With ``param.grad_dtype = None`` any dtype is.
    """
    shape = tuple(getattr(param, "ds_shape", param.shape))
    if tuple(grad.shape) != shape:
        raise RuntimeError(
            f"`param.grad` was assigned a tensor of shape {tuple(grad.shape)}; the parameter has {shape}."
        )
    if (expected := expected_grad_dtype(param)) is None:
        return
    in_fp32 = param.dtype in (torch.float16, torch.bfloat16) and grad.dtype == torch.float32
    if grad.dtype not in (param.dtype, expected) and not in_fp32:
        raise RuntimeError(f"`param.grad` was assigned a {grad.dtype} tensor; the parameter is {param.dtype}.")


def normalized(grad: Tensor, param: Tensor) -> Tensor:
    """``grad`` in the dtype that ``param`` expects.

    Args:
        grad: A gradient of any float dtype; any shape.
        param: The leaf that it belongs to.
    """
    dtype = expected_grad_dtype(param)
    return grad if dtype is None else grad.to(dtype)


def expect_grad_dtype(param: nn.Parameter, dtype: torch.dtype | None) -> None:
    """Let autograd accumulate in ``dtype`` instead of the parameter's dtype; ``param.grad`` will have it.

    Args:
        param: A leaf.
        dtype: The dtype; None: the dtype of the incoming gradient.
    """
    if expected_grad_dtype(param) == dtype:
        return
    param.grad_dtype = dtype
    setattr(param, _SET_BY_ENGINE, True)


def user_set_grad_dtype(param: nn.Parameter, cast_to: torch.dtype | None = None) -> bool:
    """Whether the user has set ``param.grad_dtype``.

    Args:
        param: A leaf.
        cast_to: The dtype that the parameter will be cast to; None: it is not cast.
    """
    if hasattr(param, _SET_BY_ENGINE):
        return False
    if cast_to is None or cast_to == param.dtype:
        return expected_grad_dtype(param) != param.dtype
    # A dtype that was set survives a cast of the parameter; the default follows the cast. A cast also loses the hooks
    # on the accumulation node, so this is tried only if the parameter will be cast anyway.
    data = param.data
    param.data = torch.empty(0, dtype=torch.float64, device=data.device)
    is_set = expected_grad_dtype(param) != torch.float64
    param.data = data
    return is_set


@contextmanager
def any_grad_dtype(module: nn.Module, cast_to: torch.dtype | None) -> Iterator[None]:
    """Let parameters take gradients of any dtype within: DeepSpeed steps its optimizers once when it builds them.

    Args:
        module: The parameters' module.
        cast_to: The dtype that parameters are cast to within; None: they are not cast.
    """
    changed = []
    for param in module.parameters():
        if hasattr(param, _SET_BY_ENGINE) or user_set_grad_dtype(param, cast_to):
            changed.append((param, expected_grad_dtype(param)))
            param.grad_dtype = None
    try:
        yield
    finally:
        for param, dtype in changed:
            param.grad_dtype = dtype


def match_patterns(
    names: Iterable[str], patterns: Mapping[str, torch.dtype | None], argument: str
) -> dict[str, torch.dtype | None]:
    """The dtype of each parameter that a pattern matches; the first matching pattern counts.

    Args:
        names: Names of the trainable parameters, as in ``module.named_parameters()``.
        patterns: Shell patterns (``*``, ``?``, ``[...]``) of whole names.
        argument: The name of the argument that holds the patterns, for the message.

    Raises:
        ValueError: If a pattern matches no parameter.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            some = ", ".join(names[:3])
            raise ValueError(
                f"`{argument}`: the pattern {pattern!r} matches none of the {len(names)} trainable parameters"
                f" ({some}, ...). A pattern must match a whole name: for example '*weight'."
            )
    chosen = {}
    for name in names:
        for pattern, dtype in patterns.items():
            if fnmatch.fnmatchcase(name, pattern):
                chosen[name] = dtype
                break
    return chosen
