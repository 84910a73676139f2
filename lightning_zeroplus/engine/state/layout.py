"""Which elements of which parameters each tensor of an engine holds on this rank, at every stage.

Upstream flattens and partitions parameters differently at each stage. In terms of parameters and elements all stages
are alike, so a checkpoint in these terms fits any stage and any number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

from deepspeed import comm as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from lightning_zeroplus.engine.optimizer.owned_steps import OwnedSteps
from lightning_zeroplus.weights.partitioned.ordinary import follow_module


class Piece(NamedTuple):
    """Consecutive elements of a flattened parameter.

    Attributes:
        name: The parameter's name.
        start: The first element.
        numel: The number of elements.
        offset: Where they begin in the flattened slot.
    """

    name: str
    start: int
    numel: int
    offset: int


#: Stands for the names of parameters that are not in the module any more; no name is empty.
_LEFT = ""


class Slot(NamedTuple):
    """A tensor that the optimizer updates as one parameter, or the weights of a parameter that it does not update.

    Attributes:
        tensor: The tensor, of any shape; the fp32 master weights if there are any.
        pieces: The elements of parameters that it holds on this rank.
        members: The names of the parameters that share its optimizer state, the same on all ranks.
        group: Index of the optimizer's parameter group; None: not optimized, or its state is in another slot.
        has_weights: Whether the weights are read from here. If not, the tensor only has the shape of the states.
    """

    tensor: Tensor
    pieces: tuple[Piece, ...]
    members: tuple[str, ...]
    group: int | None
    has_weights: bool = True


def parameter_shape(param: nn.Parameter) -> tuple[int, ...]:
    """The full shape of a parameter, even if it is partitioned."""
    return tuple(getattr(param, "ds_shape", param.shape))


def slots(engine: Any) -> list[Slot]:
    """Slots for all elements of parameters that this rank keeps, each once, with the module's current weights.

    Raises:
        ValueError: If the optimizer states are on NVMe.
    """
    if engine.kept_slots is not None:
        follow_module(engine.kept_slots, engine.module)
        return list(engine.kept_slots)
    accumulation = engine.gradient_accumulation
    is_apart = accumulation is not None and not engine.stepping and not engine.destroyed
    with accumulation.written_weights() if is_apart else nullcontext():
        return _slots(engine)


def _slots(engine: Any) -> list[Slot]:
    names = {param: name for name, param in engine.module.named_parameters()}
    if engine.basic_optimizer is None:
        optimized: list[Slot] = []
    elif engine.zero_nvme_offload_optimizer():
        raise ValueError("Checkpoints of optimizer states on NVMe are not supported: offload to the CPU instead.")
    else:
        found = _optimized(engine.optimizer, _also_left(names, engine), engine.user_groups.trained)
        optimized = list(_refined(map(_without_left, found), engine.gradient_accumulation))
    done = {name for slot in optimized for name in slot.members}
    return optimized + [_unoptimized(param, name) for param, name in names.items() if name not in done]


def _also_left(names: dict[nn.Parameter, str], engine: Any) -> dict[nn.Parameter, str]:
    """``names``, and one for the parameters that have left the module during the fit, which the optimizer still has."""
    left = (param for param in engine.gradient_accumulation.params if param not in names)
    return {**names, **dict.fromkeys(left, _LEFT)}


def _without_left(slot: Slot) -> Slot:
    pieces = tuple(piece for piece in slot.pieces if piece.name != _LEFT)
    return slot._replace(pieces=pieces, members=tuple(name for name in slot.members if name != _LEFT))


def _optimized(optimizer: Any, names: dict[nn.Parameter, str], trained: Collection[nn.Parameter]) -> Iterator[Slot]:
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        yield from _stage_3(optimizer, names)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        for group, (params, flat, own) in enumerate(
            zip(
                optimizer.round_robin_bit16_groups,
                optimizer.bit16_groups_flat,
                optimizer.single_partition_of_fp32_groups,
                strict=True,
            )
        ):
            yield _of_flat(group, params, flat, own, optimizer.real_dp_process_group[group], names)
    elif isinstance(optimizer, BF16_Optimizer):
        for group, (params, flat, own) in enumerate(
            zip(optimizer.bf16_groups, optimizer.bf16_groups_flat, optimizer.fp32_groups_flat_partition, strict=True)
        ):
            yield _of_flat(group, params, flat, own, optimizer.real_dp_process_group[group], names)
    elif isinstance(optimizer, FP16_Optimizer):
        for group, (params, flat, own) in enumerate(
            zip(optimizer.fp16_groups, optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True)
        ):
            yield _of_flat(group, params, flat, own, None, names)
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        for group, (params, masters) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)):
            for param, master in zip(params, masters, strict=True):
                yield _whole(master, names[param], group)
    else:
        for group, settings in enumerate(optimizer.param_groups):
            for param in settings["params"]:
                # A parameter that is frozen for a while has a state, or is about to get one from a checkpoint.
                is_trained = param.requires_grad or param in optimizer.state or param in trained
                if is_trained and param.numel():
                    yield _whole(param, names[param], group)


def _refined(slots: Iterator[Slot], accumulation: Any) -> Iterator[Slot]:
    """Replace a slot by one slot per parameter if the optimizer steps them one by one: see :mod:`.split_steps`."""
    pieces: Mapping[int, Mapping[str, Tensor]] = accumulation.split_pieces()
    for slot in slots:
        if id(slot.tensor) not in pieces:
            yield slot
            continue
        here = {piece.name: piece for piece in slot.pieces}
        for name, tensor in pieces[id(slot.tensor)].items():
            own = (here[name]._replace(offset=0),) if name in here else ()
            if isinstance(accumulation.split_steps, OwnedSteps):
                yield from _of_owner(slot, name, here.get(name), tensor)
                continue
            if own and own[0].numel < tensor.numel():
                own = (Piece(name, 0, tensor.numel(), 0),)  # cut, and stepped whole: see :mod:`.whole_steps`
            yield Slot(tensor, own, (name,), slot.group)


def _of_owner(slot: Slot, name: str, piece: Piece | None, whole: Tensor) -> Iterator[Slot]:
    """A parameter's weights, in this rank's partition, and its state, on its owner: see :mod:`.owned_steps`."""
    if piece is not None:
        part = slot.tensor.detach().view(-1).narrow(0, piece.offset, piece.numel)
        yield Slot(part, (piece._replace(offset=0),), (name,), None)
    everything = (Piece(name, 0, whole.numel(), 0),) if whole.numel() else ()
    yield Slot(whole, everything, (name,), slot.group, has_weights=False)


def _whole(tensor: Tensor, name: str, group: int | None) -> Slot:
    return Slot(tensor, (Piece(name, 0, tensor.numel(), 0),), (name,), group)


def _of_flat(
    group: int,
    params: list[nn.Parameter],
    flat: Tensor,
    own: Tensor,
    process_group: Any,
    names: dict[nn.Parameter, str],
) -> Slot:
    """The slot of this rank's partition ``own`` of ``flat``; all ``params`` are views of ``flat``."""
    begin = 0 if process_group is None else dist.get_rank(group=process_group) * own.numel()
    pieces = []
    for param in params:
        # From the address, because upstream chooses order and alignment.
        at = (param.data_ptr() - flat.data_ptr()) // flat.element_size() - begin
        first, last = max(at, 0), min(at + param.numel(), own.numel())
        if first < last:
            pieces.append(Piece(names[param], first - at, last - first, first))
    return Slot(own, tuple(pieces), tuple(names[param] for param in params), group)


def _stage_3(optimizer: Any, names: dict[nn.Parameter, str]) -> Iterator[Slot]:
    for index, params in enumerate(optimizer.fp16_groups):
        pieces = []
        for param in params:
            _, offset, _ = optimizer.grad_position[optimizer.get_param_id(param)]
            pieces += _of_partitioned(param, names[param], int(offset))
        yield Slot(
            optimizer.fp32_partitioned_groups_flat[index],
            tuple(pieces),
            tuple(names[param] for param in params),
            optimizer.sub_group_to_group_id[index],
        )


def _unoptimized(param: Any, name: str) -> Slot:
    if hasattr(param, "ds_id"):
        return Slot(param.ds_tensor, tuple(_of_partitioned(param, name, 0)), (name,), None)
    return _whole(param, name, None)


def _of_partitioned(param: Any, name: str, offset: int) -> list[Piece]:
    """The piece of a partitioned parameter on this rank: all partitions are equally long, and padded at the end."""
    part = param.partition_numel()
    start = dist.get_rank(group=param.ds_process_group) * part
    numel = max(0, min(part, param.ds_numel - start))
    return [Piece(name, start, numel, offset)] if numel else []
