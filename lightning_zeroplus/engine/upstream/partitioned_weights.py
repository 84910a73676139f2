"""What DeepSpeed lacks around the weights of stage 3: to load them for an evaluation, and to forget their modules."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getclosurevars
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

from lightning_zeroplus.engine.upstream.scalars import ScalarsAsBytes


class InferenceOverrides:
    """Mixin for ``DeepSpeedZeRoOffload``, which partitions parameters if there is no optimizer.

    Upstream's ``load_checkpoint`` calls this method of the optimizer, which ``DeepSpeedZeRoOffload`` does not have.
    """

    def _restore_from_bit16_weights(self) -> None:
        """Do nothing: there are no fp32 weights to refresh."""


def load_partitioned_weights(module: nn.Module, directory: str, tag: str | None) -> None:
    """Load the fp32 master weights of a ZeRO-3 checkpoint into partitioned parameters, one parameter at a time.

    The checkpoint's module states hold no partitioned weights; they are in the optimizer states of all ranks. Rank 0
    consolidates them in host memory, so the number of ranks may differ from the number that saved. A collective.

    Args:
        module: The module, with parameters partitioned over all ranks.
        directory: The folder of the checkpoint.
        tag: Which checkpoint in ``directory``; None: the latest.
    """
    is_source = comm.get_rank() == 0
    state: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(directory, tag) if is_source else {}
    for name, param in module.named_parameters():
        with ScalarsAsBytes(), GatheredParameters([param], modifier_rank=0), torch.no_grad():
            if is_source:
                param.copy_(state[name])


def forget_functions(root: nn.Module) -> None:
    """Forget what upstream's stage 3 puts into the graph around each module: it gathers and releases for one engine.

    Upstream makes these functions for a module once. With another engine, the first one would go on to gather and to
    release in every backward, without asking the other ranks.
    """
    for module in root.modules():
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            vars(module).pop(name, None)


def forget_modules() -> None:
    """Empty upstream's cache of what a module releases, which fills again where an engine is still open.

    The cache is the class's. It would keep every module, with engine, optimizer and Trainer, as long as the process.
    """
    method = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    for each in (method, *getclosurevars(method).nonlocals.values()):  # a decorator may hide it
        if hasattr(each, "cache_clear"):
            each.cache_clear()


@contextmanager
def without_modules() -> Iterator[None]:
    """Within, nothing of upstream's process keeps a module because it has, or had, an engine of stage 3."""
    forget_modules()
    running = [weakref.ref(module) for module in FWD_MODULE_STACK]  # at its bottom are the modules of all engines
    FWD_MODULE_STACK.clear()
    try:
        yield
    finally:
        FWD_MODULE_STACK[:] = [module for each in running if (module := each()) is not None]
