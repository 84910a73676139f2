"""Submodules that the user has compiled with ``torch.compile(module)``, at ZeRO stage 3."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule

from lightning_zeroplus.gradients.patches.specialize import generalize, specialize

#: Attributes that upstream sets on each module, besides those named ``ds_...``.
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
    """Mixin for torch's wrapper of a compiled module: keeps upstream's attributes on the wrapper.

    The wrapper forwards attributes to the compiled module, and has no parameters of its own. Upstream treats the
    wrapper as one more module and replaces its parameters, which would leave the compiled module with none.
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
    """Let the wrappers of compiled modules below ``root`` keep upstream's attributes; before upstream sees them."""
    for module in root.modules():
        if isinstance(module, OptimizedModule) and not isinstance(module, _KeepsItsOwn):
            specialize(module, _KeepsItsOwn)


def join(root: nn.Module) -> None:
    """Undo :func:`keep_apart`."""
    for module in root.modules():
        if isinstance(module, _KeepsItsOwn):
            generalize(module, _KeepsItsOwn)
