"""Modules whose class lists only some of their parameters: ``def parameters(self): ...`` without the frozen ones.

Users get what they have written. An engine needs all parameters, as DDP does, which lists those of each submodule.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

_ENGINES = ("lightning_zeroplus.", "deepspeed.")
_LISTS = ("parameters", "named_parameters")


def list_all(module: nn.Module) -> None:
    """Let ``module`` list all its parameters to an engine, until :func:`list_some`."""
    if any(getattr(type(module), name) is not getattr(nn.Module, name) for name in _LISTS):
        for name in _LISTS:
            vars(module)[name] = partial(_listed, module, name)


def list_some(module: nn.Module) -> None:
    """Undo :func:`list_all`."""
    for name in _LISTS:
        if isinstance(vars(module).get(name), partial):
            del vars(module)[name]


def check_registered(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Refuse an optimizer with parameters that are none of the module's.

    Raises:
        ValueError: If there are some; nothing was changed.
    """
    known = {id(param) for _, param in nn.Module.named_parameters(module)}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            unknown = next((param for param in group["params"] if id(param) not in known), None)
            if unknown is not None:
                raise ValueError(
                    f"`{type(optimizer).__name__}` has a parameter of shape {tuple(unknown.shape)} that is none of the"
                    " module's, for example of layers in a plain list. Under DDP each rank would train its own."
                    " Assign the layer to an attribute of the module, or keep layers in an `nn.ModuleList`."
                )


def _listed(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
    asks = str(sys._getframe(1).f_globals.get("__name__", ""))
    if not asks.startswith(_ENGINES):
        return getattr(type(module), name)(module, *args, **kwargs)
    if name == "named_parameters":
        return nn.Module.named_parameters(module, *args, **kwargs)
    return (param for _, param in nn.Module.named_parameters(module, "", *args, **kwargs))
