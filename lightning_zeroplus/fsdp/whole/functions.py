"""``torch.autograd.Function`` and ``torch.func`` with sharded weights: they do not call ``__torch_function__``.

The backward of a function would give the gradient of a whole weight to this rank's part of it, and its forward might
pass the part to a kernel. ``torch.func`` wraps what it differentiates by, which hides that it is a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.autograd.function import Function, _SingleLevelFunction

from lightning_zeroplus.fsdp.whole.layout import as_stored
from lightning_zeroplus.fsdp.whole.sides import SameParameter
from lightning_zeroplus.fsdp.whole.tensor import WholeDTensor, WholeView, differentiable, on_whole
from lightning_zeroplus.gradients.patches.replacement import Replacement
from lightning_zeroplus.gradients.patches.transforms import given_whole

#: Functions of this package take weights apart, or put them together.
_OF_SHARDS = "torch.distributed.tensor."
#: The class whose `apply` is called last. Up to torch 2.14 `Function.apply` calls the `apply` of its base class, also
#: where users have bound it before (`square = Square.apply`). From 2.15 on it is C++ and calls nothing.
_is_native = not hasattr(Function.apply, "__func__")
_Function: Any = Function if _is_native else _SingleLevelFunction


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    apply = super(_Function, cls).apply
    weights = [arg for arg in args if isinstance(arg, WholeDTensor)]
    if not weights or not torch._C._is_torch_function_enabled() or cls.__module__.startswith(_OF_SHARDS):
        return apply(*args, **kwargs)
    return on_whole(apply, args, kwargs, differentiable(weights), only=WholeDTensor)


_replacement = Replacement(_Function, "apply", classmethod(_apply))


def _whole(argument: Any) -> Any:
    """The argument that ``torch.func`` gets instead of ``argument``."""
    if type(argument) is not WholeDTensor:
        return argument
    in_graph = differentiable([argument])
    found = on_whole(lambda whole: whole, (argument,), {}, in_graph, only=WholeDTensor)
    with as_stored():
        return found if in_graph else found.as_subclass(Tensor)


# Compiled functions run operations on these eagerly: Dynamo cannot trace what we do then.
dynamo_config.nontraceable_tensor_subclasses |= {WholeDTensor, WholeView}
_members = nn.Module._named_members


def _named_members(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """As torch's. Users get the same objects in a step as before it, for example to ask whether they know one."""
    for name, member in _members(self, *args, **kwargs):
        as_known = isinstance(member, SameParameter) and torch._C._is_torch_function_enabled()
        yield name, member.as_listed() if as_known and not torch.compiler.is_compiling() else member


#: Within ``same_parameters()``, ``module.parameters()`` gives the parameters that users know, in the whole process.
same_parameters = Replacement(nn.Module, "_named_members", _named_members)


@contextmanager
def whole_arguments() -> Iterator[None]:
    """Give functions and transforms whole weights instead of sharded ones within, in the whole process."""
    with _replacement(), given_whole(_whole):
        yield
