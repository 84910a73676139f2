"""The same names, for users of the package ``pytorch_lightning``.

``lightning.pytorch`` and ``pytorch_lightning`` are two copies of one code base. Neither knows the classes of the other.
The strategy names are registered with both. Import classes from here::

    import pytorch_lightning as pl
    import lightning_zeroplus.pytorch_lightning as zp

    pl.Trainer(strategy="zeroplus_stage3", callbacks=[zp.ReductionMonitor()])

Modules of this package are executed a second time, under this module's name. There their imports of Lightning are
redirected to ``pytorch_lightning`` and ``lightning_fabric``. Modules in ``_SHARED``, such as the engine, exist once.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_zeroplus import *  # noqa: F403

_OURS = __name__.rpartition(".")[0]
#: Packages that are not executed a second time. What an engine has must be the same object for both.
_SHARED = tuple(
    f"{_OURS}.{name}" for name in ("engine", "fsdp", "gradients", "weights", "weight_grads", "testing", "doctor")
)
_TWINS = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}


def _turned(name: str) -> str:
    """The module to import instead of ``name``."""
    for ours, theirs in _TWINS.items():
        if name == ours or name.startswith(f"{ours}."):
            return theirs + name[len(ours) :]
    if name == __name__ or name.startswith((f"{__name__}.", *(f"{each}." for each in _SHARED))) or name in _SHARED:
        return name
    return __name__ + name[len(_OURS) :] if name.startswith(f"{_OURS}.") else name


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """The ``__import__`` of modules that are executed a second time."""
    turned = name if level else _turned(name)
    if name == _OURS and fromlist:
        for each in fromlist:  # from lightning_zeroplus import testing
            _import(f"{_OURS}.{each}")
        return sys.modules[__name__]
    if turned == name:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    if fromlist:
        return builtins.__import__(turned, globals, locals, fromlist, 0)
    # import lightning.pytorch as pl: the statement looks up "pytorch" in the returned object
    package = types.SimpleNamespace()
    setattr(package, name.split(".")[1], importlib.import_module(turned))
    return package


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


class _Finder:
    """Finds ``lightning_zeroplus.pytorch_lightning.x`` in the file of ``lightning_zeroplus.x``."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> Any:
        if not name.startswith(f"{__name__}."):
            return None
        original = importlib.util.find_spec(_OURS + name[len(__name__) :])
        if original is None or original.origin is None:
            return None
        return importlib.util.spec_from_file_location(
            name,
            original.origin,
            loader=_Loader(name, original.origin),
            submodule_search_locations=original.submodule_search_locations,
        )


__path__: list[str] = []  # a package: its modules are found by _Finder
if not any(getattr(finder, "__name__", "") == _Finder.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder)


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return list(importlib.import_module(_OURS).__all__)
    if name in importlib.import_module(_OURS).__all__:
        where = getattr(importlib.import_module(_OURS), name)
        if isinstance(where, types.ModuleType):
            return where
        value = getattr(importlib.import_module(_turned(where.__module__)), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register_strategies() -> None:
    """Register every ``zeroplus_*`` name with ``pytorch_lightning`` and ``lightning_fabric``."""
    importlib.import_module(f"{__name__}.strategy.names").register_strategies()
