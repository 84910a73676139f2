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
    return _make(mixin, cls, {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **attributes})


def subclass_for_instances(mixin: type, cls: type, name: str, **attributes: Any) -> type | None:
    """A subclass with ``mixin`` in front, to which instances of ``cls`` may be changed.

    Returns:
        The class; None: ``type(name, (mixin, cls), attributes)`` is one.
    """
    base = _base_without_dict(cls)
    has_own_memory = base.__basicsize__ > object.__basicsize__  # a class in C, such as a tensor's: it comes first
    if has_own_memory or base is _base_without_dict(mixin):
        return None
    return _inserted(mixin, cls, name, attributes)


def _make(mixin: type, cls: type, namespace: dict[str, Any]) -> type:
    made = subclass_for_instances(mixin, cls, cls.__name__, **namespace)
    return type(cls.__name__, (mixin, cls), namespace) if made is None else made


def _base_without_dict(cls: type) -> type:
    """The base below which instances get their ``__dict__``: Python compares it when ``__class__`` is assigned."""
    base: Any = cls
    while base.__dictoffset__:
        base = base.__base__
    found: type = base
    return found


def _inserted(mixin: type, cls: type, name: str, namespace: dict[str, Any]) -> type:
    """A subclass of ``cls`` alone, with its layout, that has ``mixin`` in its order of bases nevertheless.

    For classes whose first base has no instance attributes, such as ``class Base(ABC, Optimizer)``.
    """

    def mro(made: Any) -> list[type]:
        own, *others = super(meta, made).mro()
        return [own, *(each for each in mixin.__mro__ if each not in others), *others]

    meta: Any = type(type(cls).__name__, (type(cls),), {"mro": mro})
    made: type = meta(name, (cls,), {**namespace, _MIXIN: mixin})
    return made


#: An attribute of a class that :func:`_inserted` has made.
_MIXIN = "_zeroplus_mixin"


def _parts(cls: Any) -> tuple[type, type]:
    """The mixin and the class of which :func:`_make` has made a class."""
    mixin = vars(cls).get(_MIXIN)
    return cls.__bases__ if mixin is None else (mixin, *cls.__bases__)


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
    while _parts(cls)[0] is not mixin:  # later mixins come first
        removed.append(cls)
        cls = _parts(cls)[1]
    cls = _parts(cls)[1]
    for later in reversed(removed):
        namespace = {k: v for k, v in vars(later).items() if k not in ("__dict__", "__weakref__", _MIXIN)}
        namespace["__qualname__"] = later.__qualname__
        cls = _make(_parts(later)[0], cls, namespace)
    instance.__class__ = cls
