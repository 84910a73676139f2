"""Forward-mode derivatives of the linear layer that DeepSpeed puts in the place of torch's at ZeRO stage 3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

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
    """
    return (_torchs if has_duals() else zero3_linear_wrap)(input, weight, bias)


_replacement = Replacement(functional, "linear", _linear)


@contextmanager
def forward_derivatives() -> Iterator[None]:
    """Within, in the whole process, upstream's linear layer has forward derivatives. Torch's own is left alone."""
    is_upstreams = functional.linear in (zero3_linear_wrap, _linear)
    with _replacement() if is_upstreams else nullcontext():
        yield
