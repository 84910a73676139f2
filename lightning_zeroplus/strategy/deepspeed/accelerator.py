"""Make DeepSpeed use the accelerator of the Trainer.

DeepSpeed picks its accelerator once, when it is first imported: from ``DS_ACCELERATOR``, else from the hardware.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.accelerators import Accelerator as FabricAccelerator
from lightning.fabric.accelerators import CPUAccelerator as FabricCPU
from lightning.fabric.accelerators import CUDAAccelerator as FabricCUDA
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_zeroplus.engine.upstream.jit_locks import watch_jit_locks
from lightning_zeroplus.engine.upstream.shared_memory import without_shared_memory_operator
from lightning_zeroplus.internals.extensions import choose_extensions_folder
from lightning_zeroplus.strategy.common.process import leave_process_group
from lightning_zeroplus.strategy.deepspeed.config import settings

_VARIABLE = "DS_ACCELERATOR"


def is_cpu(accelerator: Accelerator | FabricAccelerator | None) -> bool:
    """Whether this is the CPU accelerator of the Trainer or of Fabric."""
    return isinstance(accelerator, (CPUAccelerator, FabricCPU))


def select_deepspeed_accelerator(accelerator: Accelerator | FabricAccelerator) -> None:
    """Set ``DS_ACCELERATOR`` for the Trainer's accelerator, before DeepSpeed is imported.

    Also choose the folder of what DeepSpeed compiles: no strategy lets it build anything before this.

    Raises:
        MisconfigurationException: If the accelerator is neither CPU nor CUDA, or if ``DS_ACCELERATOR`` or an earlier
            import of DeepSpeed has chosen another one.
    """
    if is_cpu(accelerator):
        wanted = "cpu"
    elif isinstance(accelerator, (CUDAAccelerator, FabricCUDA)):
        wanted = "cuda"
    else:
        raise MisconfigurationException(
            f"`ZeroPlusStrategy` runs on CPU and CUDA, not on `{type(accelerator).__name__}`."
            ' Use `Trainer(accelerator="cpu")` or `Trainer(accelerator="cuda")`.'
        )
    configured = os.environ.setdefault(_VARIABLE, wanted)
    if configured != wanted:
        raise MisconfigurationException(
            f"The environment says {_VARIABLE}={configured!r}, but the Trainer uses accelerator={wanted!r}."
            f" Unset {_VARIABLE}, or set it to {wanted!r}."
        )
    choose_extensions_folder()
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator()._name
    if chosen != wanted:
        raise MisconfigurationException(
            f"DeepSpeed was imported before the Trainer chose accelerator={wanted!r}, and has picked {chosen!r}."
            f" Set {_VARIABLE}={wanted} in the environment, or do not import deepspeed before the Trainer starts."
        )


def join_process_group(strategy: Any, number_ranks: Callable[[], None], upstream: Callable[[], None]) -> None:
    """Make the process group as Lightning's DeepSpeed strategies do, and also on CPU. It is destroyed at exit.

    Args:
        strategy: The strategy of the Trainer or of Fabric.
        number_ranks: Sets the global and the local rank.
        upstream: Lightning's method. It checks that devices are numbered from 0, and CPUs have no number.
    """
    ours = not torch.distributed.is_initialized()
    with watch_jit_locks(is_local_leader=strategy.local_rank == 0), without_shared_memory_operator():
        if is_cpu(strategy.accelerator):
            reset_seed()
            number_ranks()
            strategy._init_deepspeed_distributed()
            announce_local_ranks(strategy.num_processes)
        else:
            upstream()
    if ours:
        atexit.register(leave_process_group)


def announce_local_ranks(count: int) -> None:
    """Tell DeepSpeed the number of ranks on this host, in the variable that its own launcher sets.

    Without it, ZeRO-3 on CPU asks ``numactl`` for the number, in a new process, at every reduction of a bucket. Call
    this after the process group is made: if DeepSpeed knows the number earlier, it sets up shared memory for inference.
    """
    os.environ["LOCAL_SIZE"] = str(count)


def check_kernels(precision: str, dtype: torch.dtype | None) -> None:
    """Refuse a precision that the accelerator cannot compute in.

    Args:
        precision: As in ``Trainer(precision=...)``.
        dtype: The dtype of parameters and activations, None for fp32.

    Raises:
        MisconfigurationException: If it has no kernels of ``dtype``; naming both.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    supported = {torch.float16: accelerator.is_fp16_supported, torch.bfloat16: accelerator.is_bf16_supported}
    if dtype is not None and not supported[dtype]():
        raise MisconfigurationException(
            f"`Trainer(precision={precision!r})`: this {accelerator.device_name()} has no {dtype} kernels."
            ' Use `precision="bf16-true"` or `precision="32-true"`.'
        )


def configure_checkpointing(config: Mapping[str, Any]) -> None:
    """Tell ``deepspeed.checkpointing`` what the section ``activation_checkpointing`` says, if there is one."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    if config.get("activation_checkpointing"):
        checkpointing.configure(None, deepspeed_config=settings.thawed(config))
