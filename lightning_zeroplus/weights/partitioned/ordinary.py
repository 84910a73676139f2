"""Make a module ordinary again after the fit: no hooks or attributes of an engine, and whole weights."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lightning_zeroplus.weights import agreement
from lightning_zeroplus.weights.partitioned import access, copies, initializers
from lightning_zeroplus.weights.partitioned.partition import gather, partition_alike

log = logging.getLogger(__name__)

#: The share of the available host memory that whole weights may take.
_SHARE = 0.7


def make_whole(module: nn.Module) -> bool:
    """Give a module that stage 3 has partitioned its whole weights, in host memory; a collective.

    Returns:
        Whether the weights are whole; False if some host has too little memory.
    """
    params: list[Any] = [param for param in module.parameters() if hasattr(param, "ds_id")]
    if not params:
        return True
    if not _fits(sum(param.ds_numel * param.dtype.itemsize for param in params)):
        log.warning(
            "The weights stay partitioned over the ranks after the fit: there is too little host memory for the whole"
            " weights on every rank. Save a checkpoint, and write it to a file with `lightning_zeroplus.export`."
        )
        return False
    partition_alike(params)
    with torch.no_grad():
        for param in params:
            param.ds_active_sub_modules.clear()
            gather([param])
            whole = param.data.to("cpu")
            _forget_partition(param)
            param.data = whole
    return True


def _fits(nbytes: int) -> bool:
    here = (socket.gethostname(), psutil.virtual_memory().available)
    found: list[Any] = [here]
    if agreement.is_distributed():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, here)
    ranks = Counter(host for host, _ in found)
    return all(available * _SHARE >= nbytes * ranks[host] for host, available in found)


def _forget_partition(param: Any) -> None:
    if isinstance(param, access.WatchedParameter):
        param.__class__ = type(param).plain_class
    _clean(param)


def _clean(param: Any) -> None:
    attributes = vars(param)
    for name, value in list(attributes.items()):
        if copies.is_engines_on_parameter(name, value):
            del attributes[name]


def release(module: nn.Module) -> None:
    """Remove what a closed engine has left on ``module``. Partitioned parameters stay partitioned and watched."""
    initializers.remove(module)
    partitioned = any(hasattr(param, "ds_id") for param in module.parameters())
    if not partitioned:
        copies.remove(module)
        for param in module.parameters():
            _clean(param)
    for each in module.modules():
        if partitioned:
            continue
        state = vars(each)
        ordinary = copies.without_engine(state)
        for name in state.keys() - ordinary.keys():
            del state[name]
        state.update(ordinary)
    _leave_forward(set(module.modules()))


def _leave_forward(closed: set[nn.Module]) -> None:
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    # Upstream pushes the module of every stage-3 engine, and leaves there what runs when a forward fails.
    FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if module not in closed]
    for module in closed:
        if getattr(module._parameters, "_in_forward", False):
            # Else whoever reads a parameter, as `nn.LSTM.cpu()` does in Lightning's teardown, would fail for want of a
            # running module, and hide the error that has ended the fit.
            module._parameters._in_forward = False  # type: ignore[attr-defined]


@contextmanager
def keep_process() -> Iterator[None]:
    """Restore, on exit, what upstream replaces in the whole process for stage 3.

    These are ``torch.nn.functional.linear``, and with ``zero_hpz_partition_size`` the group of ranks of a node that
    share a second partition of the weights: later engines would use it, too.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.utils import groups

    # Of another strategy's fit that has failed: weights that are gathered later would be kept for its backward.
    _leave_forward({module for module in FWD_MODULE_STACK if getattr(module._parameters, "_in_forward", False)})
    linear, group = functional.linear, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
    try:
        yield
    finally:
        functional.linear, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = linear, group


@torch.no_grad()
def follow_module(slots: Any, module: nn.Module) -> None:
    """Copy the module's weights, which may have changed, to the slots that a closed engine has kept."""
    params: dict[str, Tensor] = {name: param.detach().flatten() for name, param in module.named_parameters()}
    for slot in slots:
        if not slot.has_weights:
            continue
        flat = slot.tensor.detach().flatten()
        for name, start, numel, offset in slot.pieces:
            mine = flat.narrow(0, offset, numel)
            weights = params[name].narrow(0, start, numel).to(mine.device)
            if not torch.equal(mine.to(weights.dtype), weights):
                mine.copy_(torch.where(mine.to(weights.dtype) == weights, mine, weights.to(mine.dtype)))
