"""Overrides for one object, which is there already: upstream's optimizer, a plugin of the Trainer."""

from __future__ import annotations

from typing import Any, TypeVar

_Object = TypeVar("_Object")


def specialize(instance: _Object, mixin: type, **attributes: Any) -> _Object:
    """Give ``instance`` a subclass of its own class with ``mixin`` in front, in place.

    The subclass keeps the name, because Lightning names logged learning rates after it. ``attributes`` are the class's,
    not the instance's: Lightning wraps an optimizer in a class that inherits from the optimizer's, and calls its
    methods with the wrapper as ``self``.
    """
    cls = type(instance)
    instance.__class__ = type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, **attributes})
    return instance
