"""Builds the simulated device's library once and loads it. Imports no torch: the device must be there before it.

Other processes execute this file by its path (``boot.py``), because to import it by name is to import the package, and
with it torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

_NAME = "lightning_zeroplus_simulated_cuda"
_SOURCES = Path(__file__).parent / "native"
# -O0: the library calls torch, and computes nothing itself. -DNDEBUG: torch's headers would check what only a debug
# build of torch sets.
_FLAGS = ("-std=c++20", "-fPIC", "-O0", "-DNDEBUG", "-w")
_TORCH_LIBRARIES = ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so")


class SimulatedCudaError(RuntimeError):
    """The simulated device cannot be built or loaded here. The message says why, and what to do."""


def why_unavailable() -> str | None:
    """Why there can be no simulated device on this machine; None if there can.

    Example::

        pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
    """
    if sys.platform != "linux":
        return f"The simulated CUDA device needs Linux, not {sys.platform!r}."
    torch = _torch()
    if torch is None:
        return "The simulated CUDA device needs torch: install its CPU build."
    if (torch / "lib" / "libtorch_cuda.so").exists() or (torch / "lib" / "libtorch_hip.so").exists():
        return (
            "The simulated CUDA device needs a CPU build of torch, and this one has real CUDA or ROCm: install the CPU"
            " build (`pip install torch --index-url https://download.pytorch.org/whl/cpu`), or use a real GPU."
        )
    if os.path.exists("/dev/nvidiactl"):
        return "This machine has a real GPU: install a CUDA build of torch and use it."
    if _compiler() is None:
        return "The simulated CUDA device needs a C++20 compiler: install g++, or set the variable CXX."
    return None


def build() -> Path:
    """The library's file, built if it is not there: half a minute, once for a release of torch and of this package.

    It is kept in ``TORCH_EXTENSIONS_DIR``, which :mod:`lightning_zeroplus.internals.extensions` has set: a process that
    calls this before torch has it from its parent. Any number of processes may call this at the same time: one builds
    and the others wait.

    Raises:
        SimulatedCudaError: If the library is not available here, or the compiler fails; with the compiler's output.
    """
    reason = why_unavailable()
    if reason is not None:
        raise SimulatedCudaError(reason)
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"], f"simulated_cuda-{_key()}")
    library = folder / f"{_NAME}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not library.exists():
                _compile(library)
    return library


def load(devices: int) -> ModuleType:
    """Register the device with torch, which must not be imported yet, and return the extension module.

    Args:
        devices: The number of devices that torch shall see.

    Raises:
        SimulatedCudaError: If torch has been imported, or asked for CUDA; or as :func:`build`.
    """
    if "torch" in sys.modules:
        raise SimulatedCudaError(
            "torch has been imported before the simulated CUDA device was loaded. Start the process with"
            " `python -m lightning_zeroplus.testing.simulated_cuda script.py`, or use"
            ' `RankPool(2, device="simulated_cuda")`.'
        )
    library = build()
    folder = _torch()
    assert folder is not None
    for name in _TORCH_LIBRARIES:
        ctypes.CDLL(str(folder / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    # torch asks for CUDA's hooks once, when it is imported, and remembers the answer.
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401 -- the extension module needs its Python types

    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_NAME] = module
    if not module.is_registered():
        raise SimulatedCudaError("torch was asked for CUDA before the simulated device was loaded.")
    module.set_device_count(devices)
    return module


def loaded() -> ModuleType | None:
    """The extension module of this process; None if the process has no simulated device."""
    return sys.modules.get(_NAME)


def _torch() -> Path | None:
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or "g++")


def _key() -> str:
    """A hash of all that the library depends on: sources, torch, Python, compiler and flags."""
    compiler, torch = _compiler(), _torch()
    assert compiler is not None and torch is not None
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = [compiler, version, *_FLAGS, sys.version, (torch / "version.py").read_text(), str(torch)]
    parts += [f"{path.name}\n{path.read_text()}" for path in sorted(_SOURCES.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process, however that ends
        yield


def _compile(library: Path) -> None:
    torch, compiler = _torch(), _compiler()
    assert torch is not None and compiler is not None
    headers = [torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    includes = [flag for folder in headers for flag in ("-isystem", str(folder))]
    with tempfile.TemporaryDirectory(dir=library.parent) as work:

        def compile_one(source: Path) -> str:
            made = str(Path(work, f"{source.stem}.o"))
            _run([compiler, *_FLAGS, *includes, "-c", str(source), "-o", made])
            return made

        # Two at a time: each takes up to a gigabyte.
        with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
            objects = list(pool.map(compile_one, sorted(_SOURCES.glob("*.cpp"))))
        linked = Path(work, library.name)
        libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        _run([compiler, "-shared", *objects, *libraries, "-o", str(linked)])
        os.replace(linked, library)  # whole or not at all


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SimulatedCudaError(
            f"The simulated CUDA device could not be built: {' '.join(command)} ended with exit code"
            f" {done.returncode}.\n{done.stderr}"
        )
