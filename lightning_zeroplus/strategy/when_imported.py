"""The strategy names for the package ``pytorch_lightning``, registered when somebody imports it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from typing import Any


class _Registration:
    """Registers the names when ``pytorch_lightning`` is imported; costs nothing if it never is."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> Any:
        if name != "pytorch_lightning":
            return None
        sys.meta_path.remove(cls)
        try:
            spec: Any = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, cls)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def execute_and_register(module: types.ModuleType) -> None:
                execute(module)
                if cls in sys.meta_path:
                    sys.meta_path.remove(cls)
                    _try_to_register()

            spec.loader.exec_module = execute_and_register
        return spec


def register_when_imported() -> None:
    """Register the names with ``pytorch_lightning``: now if it is imported, otherwise on its import."""
    if "pytorch_lightning" in sys.modules:
        _try_to_register()
    elif not any(getattr(finder, "__name__", "") == _Registration.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Registration)


def _try_to_register() -> None:
    try:
        # It executes modules a second time, and is imported by those who need it alone.
        importlib.import_module("lightning_zeroplus.pytorch_lightning").register_strategies()
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"lightning_zeroplus cannot register its strategies with pytorch_lightning: {error}.", stacklevel=2
        )
