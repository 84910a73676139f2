"""Modules that a user has compiled with ``torch.compile(module)``, in a module that ZeRO stage 3 partitions."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule

from lightning_zeroplus.gradients.patches.specialize import generalize, specialize

#: What upstream sets on each module, besides what is called ``ds_...``.
_UPSTREAMS = frozenset(
    (
        "_external_params",
        "_original_parameters",
        "_parameters",
        "all_parameters",
        "applied_pre_backward_ref_cnt",
        "post_bwd_fn",
        "pre_bwd_fn",
    )
)


class _KeepsItsOwn:
    """Mixin of torch's wrapper of a compiled module, bound at run time: what upstream sets on it is not the module's.

    The wrapper hands attributes on. Upstream, which takes it for a module of its own, replaces the parameters of each
    module: it would replace those of the compiled one by the wrapper's, of which there are none.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _UPSTREAMS or name.startswith("ds_"):
            vars(self)[name] = value
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self):
            del vars(self)[name]
        else:
            super().__delattr__(name)


def keep_apart(root: nn.Module) -> None:
    """Let the wrappers of compiled modules below ``root`` be modules of their own; before upstream sees them."""
    for module in root.modules():
        if isinstance(module, OptimizedModule) and not isinstance(module, _KeepsItsOwn):
            specialize(module, _KeepsItsOwn)


def join(root: nn.Module) -> None:
    """Undo :func:`keep_apart`."""
    for module in root.modules():
        if isinstance(module, _KeepsItsOwn):
            generalize(module, _KeepsItsOwn)
