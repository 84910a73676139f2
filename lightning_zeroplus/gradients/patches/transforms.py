"""``torch.func``: within ``grad``, ``vmap`` or ``jvp`` every new tensor is wrapped, whatever it is for.

Their arguments are wrapped as well, without asking for their class: the part of a weight would be taken for a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from lightning_zeroplus.gradients.patches.replacement import Replacement


def is_transformed() -> bool:
    """Whether this runs within a transform of ``torch.func``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a transform has wrapped ``tensor``: it has no memory of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


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


#: Where torch wraps an argument, by which it differentiates or over which it maps.
_WRAPPERS: dict[str, Any] = {"_wrap_tensor_for_grad": eager_transforms, "_add_batch_dim": vmap}
_plain = {name: getattr(module, name) for name, module in _WRAPPERS.items()}
_makers: list[Callable[[Any], Any]] = []


def _wrap(name: str, argument: Any, *args: Any, **kwargs: Any) -> Any:
    with outside_transforms():
        for make_whole in _makers:
            argument = make_whole(argument)
    return _plain[name](argument, *args, **kwargs)


_replacements = [Replacement(module, name, partial(_wrap, name)) for name, module in _WRAPPERS.items()]


@contextmanager
def given_whole(make_whole: Callable[[Any], Any]) -> Iterator[None]:
    """Within, in the whole process: ``torch.func`` gets ``make_whole(argument)`` in the place of each argument."""
    _makers.append(make_whole)
    with ExitStack() as replaced:
        for replacement in _replacements:
            replaced.enter_context(replacement())
        try:
            yield
        finally:
            _makers.remove(make_whole)
