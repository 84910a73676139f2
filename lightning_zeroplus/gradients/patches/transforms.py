"""``torch.func``: ``grad``, ``vmap`` and ``jvp`` wrap every new tensor within, whatever it is for.

They wrap their arguments too, without asking the argument's class: a partition of a weight would pass for the whole.
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
    """Whether a transform of ``torch.func`` is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a transform has wrapped ``tensor``: it has no memory of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Leave all transforms within: for memory that outlives them, such as the memory of a gathered weight.

    If a wrapped tensor were assigned to ``param.data``, torch would read memory that is not there.
    """
    if is_transformed():
        with temporarily_clear_interpreter_stack():
            yield
    else:
        yield


def has_duals() -> bool:
    """Whether a ``torch.autograd.forward_ad.dual_level()`` is open."""
    return getattr(forward_ad, "_current_level", -1) >= 0


#: The functions by which torch wraps an argument that it differentiates by or maps over, and their modules.
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
    """Let ``torch.func`` get ``make_whole(argument)`` instead of each argument within, in the whole process."""
    _makers.append(make_whole)
    with ExitStack() as replaced:
        for replacement in _replacements:
            replaced.enter_context(replacement())
        try:
            yield
        finally:
            _makers.remove(make_whole)
