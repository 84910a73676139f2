"""Forward-mode derivatives of the linear layer that DeepSpeed puts in the place of torch's at ZeRO stage 3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import Tensor
from torch.nn import functional

from lightning_zeroplus.gradients.patches.replacement import Replacement
from lightning_zeroplus.gradients.patches.transforms import has_duals

_torchs = torch._C._nn.linear


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Upstream's function has no forward derivative. Where one is asked for, torch's is used.

    Upstream's is not given one, because ``torch.compile`` does not trace a function that has one.

    Torch's is used for small weights, too. It keeps a view of the weight for its backward, which would keep a large one
    in memory. But autocast would keep a copy of the weight, which a step within does not update.
    """
    if has_duals() or (not torch.compiler.is_compiling() and _stays(weight)):
        return _torchs(input, weight, bias)
    return zero3_linear_wrap(input, weight, bias)


def _stays(weight: Any) -> bool:
    return getattr(weight, "ds_persist", False) and weight.numel() and not torch.is_autocast_enabled(weight.device.type)


_replacement = Replacement(functional, "linear", _linear)


@contextmanager
def forward_derivatives() -> Iterator[None]:
    """Within, in the whole process, upstream's linear layer has forward derivatives. Torch's own is left alone."""
    is_upstreams = functional.linear in (zero3_linear_wrap, _linear)
    with _replacement() if is_upstreams else nullcontext():
        yield
