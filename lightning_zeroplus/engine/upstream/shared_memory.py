"""Keeps DeepSpeed from compiling an operator that training does not use."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module

from lightning_zeroplus.gradients.patches.replacement import Replacement


def without_shared_memory_operator() -> AbstractContextManager[None]:
    """Within, DeepSpeed makes its process group without the operator that reduces through shared memory on the CPU.

    Only ``inference_all_reduce`` calls that operator, and it all-reduces in the process group where there is none.
    Compiling it takes a minute, and fails on a machine without a compiler.
    """
    return _replacement()()


@cache
def _replacement() -> Replacement:
    # Not `from deepspeed.comm import torch`: that is torch itself, which the package has imported under this name.
    return Replacement(import_module("deepspeed.comm.torch"), "build_shm_op", _no_operator)


def _no_operator() -> None:
    return None
