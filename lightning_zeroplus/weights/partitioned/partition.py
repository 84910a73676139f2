"""Operations on a parameter that ZeRO stage 3 has partitioned. Nothing here imports DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_zeroplus.gradients.ranks.agreement import Presence
from lightning_zeroplus.weights import agreement
from lightning_zeroplus.weights.overlaps import check_apart


def is_partitioned(param: Any) -> bool:
    """Whether stage 3 manages ``param``, and it is partitioned now."""
    return hasattr(param, "ds_id") and param.ds_status.name == "NOT_AVAILABLE"


def own_slice(param: Any, whole: Tensor | None) -> tuple[Tensor, Any]:
    """This rank's partition without padding, and the corresponding elements of ``whole``, if given; both flat."""
    length = param.ds_tensor.ds_numel
    start = min(length * torch.distributed.get_rank(param.ds_process_group), param.ds_numel)
    numel = min(length, param.ds_numel - start)
    values = None if whole is None else whole.reshape(-1).narrow(0, start, numel)
    return param.ds_tensor.narrow(0, 0, numel), values


@torch.no_grad()
def write(param: Any, whole: Tensor) -> None:
    """Copy this rank's elements of ``whole`` to its partition and to the master weights."""
    mine, values = own_slice(param, whole)
    mine.copy_(values)
    master_follows(param)


def keep_written(param: Any) -> None:
    """Before a gathered ``param`` is released: copy what was written to it to its partition, if it was written."""
    if is_whole(param) and getattr(param, "is_written", bool)():
        write(param, param.data)
        note_kept(param)


def note_kept(param: Any) -> None:
    """Note that a gathered ``param`` and its partitions have the same values, if the parameter is watched."""
    if hasattr(param, "note_kept"):
        param.note_kept()


@torch.no_grad()
def master_follows(param: Any) -> None:
    """Copy the partition of ``param`` to its fp32 master partition, unless they share memory.

    A master weight stays as precise as it is if its rounded value is the weight.
    """
    optimizer = getattr(param, "_z3_optimizer", None)
    if optimizer is None or optimizer.get_param_id(param) not in optimizer.grad_position:
        return  # not in the optimizer
    group, offset, numel = optimizer.grad_position[optimizer.get_param_id(param)]
    is_on_nvme = optimizer._swappable_optimizer_subgroup(group)
    if is_on_nvme:
        optimizer._optimizer_states_and_gradient_swap_in(group)
    master = optimizer.fp32_partitioned_groups_flat[group].narrow(0, offset, numel)
    if master.data_ptr() != param.ds_tensor.data_ptr():
        weights = param.ds_tensor.to(master.device)
        master.data.copy_(torch.where(master.to(weights.dtype) == weights, master, weights.to(master.dtype)))
    if is_on_nvme:
        optimizer._optimizer_states_and_gradient_swap_out(group)


def copy_(param: Any, source: Any, non_blocking: bool = False) -> Any:
    """``param.copy_(source)`` for a partitioned parameter: every rank copies its own partition."""
    if torch.is_grad_enabled() and param.requires_grad:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    if is_partitioned(source):
        if tuple(source.ds_shape) != tuple(param.ds_shape):
            raise RuntimeError(
                f"`param.copy_(source)` of partitioned parameters needs equal shapes, not {tuple(param.ds_shape)} and"
                f" {tuple(source.ds_shape)}."
            )
        with torch.no_grad():
            param.ds_tensor.copy_(source.ds_tensor)
        master_follows(param)
    else:
        write(param, source.detach().expand(param.ds_shape))
    return param


def equal(one: Any, other: Any) -> bool:
    """``torch.equal`` if stage 3 has partitioned one of the tensors, or both. A collective if shapes are equal."""
    if one is other or tuple(_shape(one)) != tuple(_shape(other)):
        return one is other
    managed = one if hasattr(one, "ds_id") else other
    serve_others([managed])
    agreement.meet("torch.equal() of a partitioned parameter", details="")
    mine = [own_slice(each, None)[0] if is_partitioned(each) else own_slice(managed, each)[1] for each in (one, other)]
    same = torch.tensor(float(torch.equal(*mine)), device=managed.ds_tensor.device)
    torch.distributed.all_reduce(same, torch.distributed.ReduceOp.MIN, group=managed.ds_process_group)
    return bool(same)


def _shape(tensor: Any) -> torch.Size:
    return tensor.ds_shape if is_partitioned(tensor) else tensor.shape


@torch.no_grad()
def take_over_written(params: Iterable[Any], held: Mapping[Any, Tensor]) -> None:
    """Copy parameters that stay gathered, and may have been written, to their partitions.

    Called before an optimizer step, which overwrites gathered parameters from the partitions.

    Args:
        params: The parameters.
        held: The memory of those that have been released, and that users have.

    Raises:
        RuntimeError: If two have the same memory; no weight was updated.
    """
    whole = [param for param in params if hasattr(param, "ds_id") and param.ds_status.name == "AVAILABLE"]
    whole = [param for param in whole if _may_differ(param)]
    memories = {**held, **{param: param.data for param in whole}}
    if len(memories) > 1:
        check_apart((getattr(param, "_zeroplus_name", "?"), memory) for param, memory in memories.items())
    if whole:
        mine, values = zip(*(own_slice(param, param.data) for param in whole), strict=True)
        torch._foreach_copy_(mine, _beside(mine[0], values))
        for param in whole:
            master_follows(param)
            note_kept(param)  # the step may release it, when its partition is newer


def _may_differ(param: Any) -> bool:
    """Whether a whole weight was written, or others have its memory, or nobody watches it."""
    return getattr(param, "_zeroplus_given", True) or param.is_written()


def _beside(mine: Tensor, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The values where the partitions are: on the host if they are offloaded, which waits once for all values."""
    if values[0].device == mine.device:
        return values
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for each in values:
        by_dtype.setdefault(each.dtype, []).append(each)
    moved = {
        dtype: iter(torch.cat(each).to(mine.device).split([value.numel() for value in each]))
        for dtype, each in by_dtype.items()
    }
    return tuple(next(moved[each.dtype]) for each in values)


def settle(param: Any) -> None:
    """Wait for ``param`` if upstream is gathering it."""
    in_flight = getattr(param, "_zeroplus_in_flight", {})
    if param in in_flight:
        in_flight.pop(param).wait()


def is_whole(param: Any) -> bool:
    """Whether ``param``, which stage 3 manages, is gathered now."""
    return param.ds_status.name == "AVAILABLE"


def serve_others(params: Iterable[Any]) -> None:
    """Before all ranks meet: take part in gathers of a rank that still runs modules that the others do not run.

    Args:
        params: Parameters of stage 3, or of FSDP2's units.
    """
    for serve in dict.fromkeys(getattr(param, "serve_others", None) for param in params):
        if serve is not None:
            serve()


def partition_alike(params: Iterable[Any]) -> None:
    """Mark those parameters as partitioned that are partitioned on some rank; a collective, with the same parameters.

    Ranks may differ: one may have run modules, and kept their weights gathered, that others have not run.
    """
    listed = list(params)
    for param in listed:
        settle(param)
    if not agreement.is_distributed():
        return
    here = {index for index, param in enumerate(listed) if is_partitioned(param)}
    for index in Presence(range(len(listed)), here, agreement.device()).result() - here:
        keep_written(listed[index])
        listed[index].ds_status = type(listed[index].ds_status).NOT_AVAILABLE


def gather(params: Iterable[Any]) -> None:
    """Gather partitioned parameters, and wait for those that are being gathered; a collective."""
    listed = list(params)
    for param in listed:
        settle(param)
    wanted = [param for param in listed if is_partitioned(param)]
    if wanted:
        wanted[0].all_gather(param_list=sorted(wanted, key=lambda param: param.ds_id))


def gather_alike(
    param: Any, gather_all: Callable[..., Any], param_list: Iterable[Any] | None = None, **kwargs: Any
) -> Any:
    """Gather the parameters that are partitioned on some rank; a collective.

    Args:
        param: The parameter to gather if there is no list.
        gather_all: DeepSpeed's function, which looks at this rank only.
        param_list: The parameters to gather.
        **kwargs: Passed on.
    """
    listed = [param] if param_list is None else list(param_list)
    serve_others(listed)
    partition_alike(listed)
    return gather_all(param_list=listed, **kwargs)


def release_unused(
    param: Any,
    release: Callable[..., None],
    param_list: Iterable[Any] | None = None,
    hierarchy: int = 0,
    has_been_updated: bool = False,
    **kwargs: Any,
) -> None:
    """Partition the parameters that are not in use; copy what was written to the others to their partitions.

    Args:
        param: The parameter if there is no list.
        release: DeepSpeed's function, which refuses parameters in use.
        param_list: The parameters.
        hierarchy: Passed on.
        has_been_updated: Whether they may have been written.
        **kwargs: Passed on.
    """
    listed = [param] if param_list is None else list(param_list)
    used = {id(each) for each in listed if each.ds_active_sub_modules and is_whole(each)}
    for each in listed:
        if id(each) in used and has_been_updated:
            write(each, each.data)
            note_kept(each)
    rest = [each for each in listed if id(each) not in used]
    if rest:
        release(rest, hierarchy, has_been_updated, **kwargs)
