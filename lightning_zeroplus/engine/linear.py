"""Forward-mode derivatives of the linear layer that DeepSpeed puts in the place of torch's at ZeRO stage 3."""

from __future__ import annotations

import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import Tensor
from torch.nn import functional

from lightning_zeroplus.gradients.transforms import has_duals

_torchs = torch._C._nn.linear


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Upstream's function has no forward derivative. Where one is asked for, torch's is used.

    Upstream's is not given one, because ``torch.compile`` does not trace a function that has one.
    """
    return (_torchs if has_duals() else zero3_linear_wrap)(input, weight, bias)


class ForwardDerivative:
    """Puts :func:`_linear` in the place of upstream's, from when it is made until :meth:`close`.

    It stays as long as any engine needs it.
    """

    _users = 0

    def __init__(self) -> None:
        self._is_open = functional.linear in (zero3_linear_wrap, _linear)
        if self._is_open:
            ForwardDerivative._users += 1
            functional.linear = _linear

    def close(self) -> None:
        """Leave the function as it was, unless others need it. May be called again."""
        if self._is_open:
            self._is_open = False
            ForwardDerivative._users -= 1
            if not ForwardDerivative._users and functional.linear is _linear:
                functional.linear = zero3_linear_wrap
