"""Whether another package has, and calls, what we override or read although it is not public.

If a release has renamed a method, an override of it would never be called, and gradients would be lost silently. So it
is looked for before anything is built on it. Versions are never compared.
"""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType
from typing import Any, NamedTuple


class Probe(NamedTuple):
    """One feature, and what it needs of one class or module of another package.

    Attributes:
        feature: What works because of it.
        stages: The ZeRO stages that need it.
        owner: The full name of the class or module.
        methods: The methods that it must have, separated by blanks.
        attributes: The names that its code must use, separated by blanks: attributes of instances or of modules. Of
            names joined by ``|`` one is enough.
        calls: Pairs of one of its methods and a name that must be called, or read, in the method.
        loops: Pairs of one of its methods and the local variable over which the method must loop.
        all_names: Pairs of one of its methods and all names that the method may use, separated by blanks: something
            takes its place, and does what it did when this was written.
        without: What happens without the feature; None: it is refused.
    """

    feature: str
    stages: tuple[int, ...]
    owner: str
    methods: str = ""
    attributes: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    loops: tuple[tuple[str, str], ...] = ()
    all_names: tuple[tuple[str, str], ...] = ()
    without: str | None = None

    def missing(self) -> list[str]:
        """What is lacking, or is new: ``Class.name``, ``Class.caller -> name`` or ``Class.method: for ... in name``."""
        path, _, name = self.owner.rpartition(".")
        try:
            owner: Any = None
            if name.lstrip("_")[0].isupper():
                owner = getattr(importlib.import_module(path), name)
            else:
                itself = importlib.import_module(self.owner)
                owner = getattr(importlib.import_module(path), name, itself)
                owner = owner if inspect.ismodule(owner) else itself  # a package may hide it by a function's name
        except (ImportError, AttributeError):
            return [self.owner]
        lost = [each for each in self.methods.split() if not callable(getattr(owner, each, None))]
        used = _names_in_class(owner) if self.attributes else frozenset()
        lost += [
            each
            for each in self.attributes.split()
            if not any(name in used or hasattr(owner, name) for name in each.split("|"))
        ]
        lost += [
            f"{caller} -> {called}" for caller, called in self.calls if called not in _names_in(_member(owner, caller))
        ]
        lost += [
            f"{method}: for ... in {variable}"
            for method, variable in self.loops
            if not _loops_over(_member(owner, method), variable)
        ]
        for method, known in self.all_names:
            names = filter(str.isidentifier, _names_in(_member(owner, method)))
            lost += [f"{method} -> {each}" for each in sorted(set(names) - set(known.split()))]
        return [f"{name}.{each}" for each in lost]


def _member(owner: Any, name: str) -> Any:
    if name.startswith("__") and not name.endswith("__"):
        name = f"_{owner.__name__}{name}"
    return getattr(owner, name, None)


def _names_in(function: Any) -> frozenset[str]:
    """The attributes, globals and strings that a function uses, with the functions inside it or wrapped by it."""
    function = getattr(function, "fget", None) or getattr(function, "__func__", function)
    names = frozenset(_walk(function.__code__)) if hasattr(function, "__code__") else frozenset()
    for cell in getattr(function, "__closure__", None) or ():
        names |= _names_in(cell.cell_contents)  # upstream's decorators set no __wrapped__
    return names


def _loops_over(function: Any, variable: str) -> bool:
    steps = list(dis.get_instructions(function)) if hasattr(function, "__code__") else []
    loaded = (step.argval == variable and after.opname == "GET_ITER" for step, after in pairwise(steps))
    return any(loaded)


def _walk(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _walk(constant)
        elif isinstance(constant, str):
            yield constant  # for getattr(), setattr()


def _names_in_class(owner: Any) -> frozenset[str]:
    """The names that the functions of a class or module use, including the class's bases in the same package."""
    package = f"{getattr(owner, '__module__', owner.__name__).split('.')[0]}."
    owners = [cls for cls in getattr(owner, "__mro__", ()) if cls.__module__.startswith(package)] or [owner]
    members = [member for each in owners for member in vars(each).values()]
    members += [
        member
        for cls in members
        if inspect.isclass(cls) and cls.__module__ == getattr(owner, "__name__", None)
        for member in vars(cls).values()
    ]
    return frozenset().union(*(_names_in(member) for member in members if not inspect.isclass(member)))
