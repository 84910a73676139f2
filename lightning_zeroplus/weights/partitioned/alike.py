"""Tensors that stand for a parameter, in a class and with attributes that the user knows it by.

Some optimizers look at more than numbers: at the class of a parameter, as those on manifolds do, or at an attribute
that the model has set on it, such as a factor of the learning rate. A part of a flat tensor has neither.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from lightning_zeroplus.weights.partitioned.copies import is_engines_on_parameter, own_class

#: The optimizers that look at parameters in this way.
looking: WeakSet[Any] = WeakSet()


def users_attributes(param: nn.Parameter) -> dict[str, Any]:
    """What the user has set on a parameter."""
    return {name: value for name, value in vars(param).items() if not is_engines_on_parameter(name, value)}


class _StandsFor:
    """Mixin: attributes that a tensor lacks are those of the parameter."""

    def __getattr__(self, name: str) -> Any:
        param = vars(self).get("_zeroplus_param")
        value = None if param is None else vars(param).get(name)
        if param is None or name not in vars(param) or is_engines_on_parameter(name, value):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return value


def stand_for(tensor: Tensor, param: nn.Parameter) -> Tensor:
    """Let a leaf have the class of a parameter, and show its attributes.

    Args:
        tensor: A tensor; changed in place.
        param: The parameter, which may be partitioned.

    Returns:
        ``tensor``.
    """
    tensor.__class__ = _class_like(own_class(param))
    tensor._zeroplus_param = param  # type: ignore[attr-defined]
    return tensor


@cache
def in_form(form: Any, own: type) -> Any:
    """``form``, which has to be a class of tensors, as a class that a parameter of the user's class may have."""
    if own is nn.Parameter:
        return form
    return type(own.__name__, (form, own), {"__module__": own.__module__})


@cache
def _class_like(own: type) -> Any:
    return type(own.__name__, (_StandsFor, own), {"__module__": own.__module__})
