"""Overrides for one existing object: upstream's optimizer, a plugin of the Trainer."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

_Object = TypeVar("_Object")


def specialize(instance: _Object, mixin: type, **attributes: Any) -> _Object:
    """Give ``instance`` a subclass of its own class with ``mixin`` in front, in place.

    The subclass keeps the class's name, because Lightning names logged learning rates after it. ``attributes`` belong
    to the class, not to the instance: Lightning wraps an optimizer in a subclass of the optimizer's class, and calls
    the methods with the wrapper as ``self``.
    """
    make: Any = _subclass if attributes else _shared_subclass
    instance.__class__ = make(mixin, type(instance), **attributes)
    return instance


def _subclass(mixin: type, cls: type, **attributes: Any) -> type:
    # Lightning keeps a callback's state under its qualified name.
    return type(
        cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **attributes}
    )


#: One subclass for all parameters of a class, because Dynamo compiles a frame anew for each class that it meets.
_shared_subclass = functools.cache(_subclass)


def add_base(instance: Any, base: type) -> None:
    """Make ``instance`` a ``base`` too, as the last base: its own class and :func:`specialize` take precedence."""
    cls = type(instance)
    bases = (*cls.__bases__, base)
    instance.__class__ = type(cls.__name__, bases, {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def generalize(instance: Any, mixin: type) -> None:
    """Take ``mixin`` out of the class of ``instance`` again: the inverse of :func:`specialize`.

    Args:
        instance: An object specialized with ``mixin``, and perhaps with other mixins before or afterwards.
        mixin: The mixin to remove; other mixins stay.
    """
    removed: list[type] = []
    cls = type(instance)
    while cls.__bases__[0] is not mixin:  # later mixins come first
        removed.append(cls)
        cls = cls.__bases__[1]
    cls = cls.__bases__[1]
    for later in reversed(removed):
        namespace = {key: value for key, value in vars(later).items() if key not in ("__dict__", "__weakref__")}
        namespace["__qualname__"] = later.__qualname__
        cls = type(cls.__name__, (later.__bases__[0], cls), namespace)
    instance.__class__ = cls
