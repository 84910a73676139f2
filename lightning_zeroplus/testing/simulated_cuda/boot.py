"""Starts a process that has the simulated device before it imports torch. Executed by its path, not imported.

``boot.py run DEVICES SCRIPT ARGS...`` runs a script. ``boot.py rank DEVICES FD`` is a rank of a pool.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

_PACKAGE = "lightning_zeroplus.testing.simulated_cuda"
_FOLDER = Path(__file__).parent


def _load(name: str) -> ModuleType:
    """A file of this folder as the module that it is, without its parent packages: these import torch."""
    spec = importlib.util.spec_from_file_location(f"{_PACKAGE}.{name}", _FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def activate(devices: int) -> None:
    """Give this process the simulated device, for ``torch.cuda``, ``torch.distributed`` and DeepSpeed.

    Args:
        devices: How many devices torch shall see.
    """
    native = _load("library").load(devices)
    _load("device").install(native, devices)
    _load("operators").install()
    _load("process_group").install(native)
    os.environ["DS_ACCELERATOR"] = "cuda"


def _run(devices: int, script: str, arguments: list[str]) -> None:
    import runpy

    activate(devices)  # cuda:0 is current, as on a GPU: a script that sets no device must fail here, too
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _rank(devices: int, descriptor: int) -> None:
    from multiprocessing import spawn
    from multiprocessing.connection import Connection

    pipe = Connection(descriptor)
    preparation = pipe.recv()
    activate(devices)
    spawn.prepare(preparation)  # the parent's sys.path, folder and main module
    serve, arguments = pipe.recv()
    serve(*arguments, pipe)


if __name__ == "__main__":
    if sys.path and Path(sys.path[0]) == _FOLDER:
        sys.path.pop(0)  # modules of this folder have common names
    if sys.argv[1] == "run":
        _run(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        _rank(int(sys.argv[2]), int(sys.argv[3]))
