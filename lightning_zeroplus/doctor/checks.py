"""The checks. Each yields findings about one subject. Only ``locks(fix=True)`` repairs anything."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_zeroplus.doctor.finding import Finding, Status
from lightning_zeroplus.engine.upstream.jit_locks import JitLock, extensions_root, find_locks, remove_stale_locks

_PACKAGES = ("torch", "lightning", "deepspeed", "torchmetrics", "psutil")


def examine(*, fix: bool = False, smoke: bool = True) -> Iterator[Finding]:
    """Run all checks, the most expensive last.

    Args:
        fix: Remove stale locks.
        smoke: Also train a few steps on two processes of this machine.
    """
    yield from versions()
    yield from accelerator()
    yield from capabilities()
    yield from probes()
    yield from builders()
    yield from locks(fix=fix)
    if smoke:
        from lightning_zeroplus.doctor.smoke import smoke_test

        yield from smoke_test()


def versions() -> Iterator[Finding]:
    """Versions of Python and of packages, compared with the requirements that this package declares."""
    from packaging.requirements import Requirement

    yield Finding(
        "versions", "python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    declared = {}
    for text in importlib.metadata.requires("lightning-zeroplus") or ():
        requirement = Requirement(text)
        if requirement.marker is None:
            declared[requirement.name] = requirement.specifier
    yield Finding("versions", "lightning-zeroplus", "ok", importlib.metadata.version("lightning-zeroplus"))
    for name in _PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("versions", name, "problem", f"not installed: pip install '{name}{declared.get(name, '')}'")
            continue
        wanted = declared.get(name)
        if wanted is None or wanted.contains(version, prereleases=True):
            yield Finding("versions", name, "ok", version)
        else:
            yield Finding("versions", name, "problem", f"{version}, untested: pip install '{name}{wanted}'")


def accelerator() -> Iterator[Finding]:
    """Devices, and the backends of process groups."""
    section = "accelerator"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(gpus)}))
        yield Finding(section, "cuda", "ok", f"{gpus} x {names}, CUDA {torch.version.cuda}")
    else:
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "no usable device"
        yield Finding(section, "cuda", "unavailable", f'{reason}: Trainer(accelerator="cpu")')
    threads = torch.get_num_threads()
    yield Finding(section, "cpu", "ok", f"{os.cpu_count()} cores, {threads} threads per process")
    wanted = os.environ.get("DS_ACCELERATOR")
    if wanted == "cuda" and not gpus:
        yield Finding(section, "DS_ACCELERATOR", "problem", "'cuda', but there is no CUDA device: unset the variable")
    elif wanted is not None and wanted not in ("cpu", "cuda"):
        yield Finding(
            section, "DS_ACCELERATOR", "problem", f"{wanted!r}, but only 'cpu' and 'cuda' are supported: unset it"
        )
    elif wanted is not None:
        yield Finding(section, "DS_ACCELERATOR", "ok", f"{wanted!r}: Trainer(accelerator={wanted!r}) only")
    for name, available, needed in (
        ("gloo", dist.is_gloo_available(), "CPU"),
        ("nccl", dist.is_nccl_available() and gpus > 0, "CUDA"),
    ):
        missing: Status = "problem" if name == "gloo" and not gpus else "unavailable"
        yield Finding(section, name, "ok" if available else missing, f"the process group's backend on {needed}")


def capabilities() -> Iterator[Finding]:
    """Features that torch or DeepSpeed has, that this package adds, or that are missing."""
    section = "capabilities"
    yield Finding(section, "several backwards per step", "patched", "ZeRO stages 0 to 3; upstream keeps only the last")
    yield Finding(section, "one reduction per step", "patched", "coalesce() and reduction='step' at stages 0 to 3")
    yield Finding(section, "gradient dtypes", "native", "Tensor.grad_dtype, for accumulate_dtype=torch.float32, too")
    yield _low_precision("bf16", "is_bf16_supported")
    yield _low_precision("fp16", "is_fp16_supported")
    yield from _deepcompile()
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        yield Finding(section, "FSDP2", "unavailable", "this torch has no torch.distributed.fsdp.fully_shard")
    else:
        yield Finding(section, "FSDP2", "native", f"{fully_shard.__module__.split('._')[0]}.fully_shard")


def _low_precision(name: str, probe: str) -> Finding:
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator()
    if getattr(chosen, probe)():
        return Finding("capabilities", name, "native", f'{chosen.device_name()} kernels, for precision="{name}-true"')
    return Finding("capabilities", name, "unavailable", f"this {chosen.device_name()} has no such kernels")


def _deepcompile() -> Iterator[Finding]:
    section = "capabilities"
    try:
        importlib.import_module("lightning_zeroplus.engine.compile.session")
    except ImportError as error:
        yield Finding(section, "DeepCompile", "unavailable", f"this DeepSpeed has another compiler: {error}")
        return
    yield Finding(section, "DeepCompile", *_deepcompile_operators())
    why = "parameters gathered on access, gradients reduced; ReductionMonitor names the modules"
    yield Finding(section, "frames that Dynamo skips", "patched", why)


def _deepcompile_operators() -> tuple[Status, str]:
    if not torch.cuda.is_available():
        return "patched", "its operators in Python, on CPU with gloo"
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    builder: Any = ALL_OPS.get("dc")
    hindrance = "this DeepSpeed does not have it" if builder is None else _hindrance(builder)
    if hindrance:
        return "unavailable", f"on CUDA it needs DeepSpeed's extension: {hindrance}"
    return "native", "DeepSpeed's CUDA extension can be built; on a GPU it has not been run"


def _hindrance(builder: Any) -> str:
    """Why an operator cannot be built here; empty if it can."""
    try:
        return "" if builder.is_compatible(verbose=False) else "its libraries are not installed here"
    except Exception as error:  # DeepSpeed raises where torch has CUDA and there is no toolkit: a plain `pip install`
        return " ".join(f"{type(error).__name__}: {error}".split())


def probes() -> Iterator[Finding]:
    """Whether the installed DeepSpeed and torch still have the internals that are overridden or read."""
    from lightning_zeroplus.engine.upstream.probe import OPTIONAL, REQUIRED
    from lightning_zeroplus.internals.torch import FSDP, GRADIENTS

    for needed, where in ((GRADIENTS, "every strategy"), (FSDP, "zeroplus_fsdp")):
        lost = [name for probe in needed for name in probe.missing()]
        detail = f"the installed torch has no {', '.join(lost)}" if lost else "as known"
        yield Finding("engine", f"torch under {where}", "problem" if lost else "ok", detail)
    for probe in REQUIRED:
        lost = probe.missing()
        detail = f"the installed DeepSpeed has no {', '.join(lost)}" if lost else f"as known, in {_short(probe.owner)}"
        yield Finding("engine", probe.feature, "problem" if lost else "ok", detail)
    for probe in OPTIONAL:
        if probe.missing():
            yield Finding("engine", probe.feature, "patched", f"not in {_short(probe.owner)}: {probe.without}")
        else:
            yield Finding("engine", probe.feature, "native", f"in {_short(probe.owner)}")


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def builders() -> Iterator[Finding]:
    """The tools that build DeepSpeed's operators, and the state of each operator."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    from torch.utils import cpp_extension

    section = "operators"
    compiler = cpp_extension.get_cxx_compiler()
    found = shutil.which(compiler)
    yield Finding(
        section,
        "compiler",
        "ok" if found else "unavailable",
        found or f"{compiler!r} is not on the PATH: operators cannot be built, and none is needed on CPU",
    )
    ninja = cpp_extension.is_ninja_available()
    yield Finding(section, "ninja", "ok" if ninja else "unavailable", "found" if ninja else "pip install ninja")
    root = extensions_root()
    yield Finding(
        section, "folder", "ok" if root else "problem", str(root or "cannot be created: set TORCH_EXTENSIONS_DIR")
    )
    for name, builder in sorted(ALL_OPS.items()):
        if name == "deepspeed_not_implemented":
            continue  # a placeholder
        if root is not None and any((Path(root) / builder.name).glob("*.so")):
            yield Finding(section, name, "ok", "built")
        elif hindrance := _hindrance(builder):
            yield Finding(section, name, "unavailable", hindrance)
        else:
            yield Finding(section, name, "ok", "can be built when needed")


def locks(*, fix: bool, root: Path | None = None) -> Iterator[Finding]:
    """Locks of operators that are being built, or whose builder died.

    Args:
        fix: Remove the stale locks.
        root: The folder to search, see :func:`~lightning_zeroplus.engine.upstream.jit_locks.find_locks`.
    """
    present = find_locks(root)
    removed = remove_stale_locks(present) if fix else []
    if not present:
        yield Finding("locks", "operators", "ok", "none")
    for lock in present:
        yield Finding("locks", lock.op, *_judge(lock, lock in removed))


def _judge(lock: JitLock, removed: bool) -> tuple[Status, str]:
    if removed:
        return "ok", f"removed a stale lock: {lock.path}"
    if lock.stale:
        return "problem", f"a dead process left {lock.path}, and runs may wait for it: remove it with `doctor --fix`"
    if lock.holders:
        return "ok", f"being built by process {', '.join(map(str, lock.holders))} for {lock.age_s:.0f} s"
    return "ok", f"locked for {lock.age_s:.0f} s by a process that this machine cannot see: {lock.path}"
