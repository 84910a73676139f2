"""``torch.func``: within ``grad``, ``vmap`` or ``jvp`` every new tensor is wrapped, whatever it is for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Whether this runs within a transform of ``torch.func``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Outside of all of them: for memory that outlives them, such as that of a gathered weight.

    A wrapped tensor that is assigned to ``param.data`` makes torch read memory that is not there.
    """
    if is_transformed():
        with temporarily_clear_interpreter_stack():
            yield
    else:
        yield


def has_duals() -> bool:
    """Whether this runs within ``torch.autograd.forward_ad.dual_level()``."""
    return getattr(forward_ad, "_current_level", -1) >= 0
