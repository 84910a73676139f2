"""An engine's state by parameter, which can be saved at one stage and world size and loaded at another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from lightning_zeroplus.checkpoint.hooked import saved_names
from lightning_zeroplus.checkpoint.names import AVERAGES, dtype_to_load, is_step, sorted_states
from lightning_zeroplus.engine.families.masters import with_masters
from lightning_zeroplus.engine.optimizer.chain import name_of, settings_of
from lightning_zeroplus.engine.state.groups import described, groups
from lightning_zeroplus.engine.state.layout import Piece, Slot, parameter_shape, slots
from lightning_zeroplus.weights.partitioned import access

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class Part(NamedTuple):
    """Consecutive elements of a parameter, or of one of its optimizer states.

    Attributes:
        name: The parameter's name.
        state: The key of the optimizer state; None: the weights.
        start: The first element of the flattened parameter.
        data: The elements, one-dimensional.
    """

    name: str
    state: str | None
    start: int
    data: Tensor


class EngineState:
    """Reads the state of an engine for a checkpoint, and loads it.

    Args:
        engine: A :class:`~lightning_zeroplus.engine.engine.ZeroPlusEngine`.

    Raises:
        ValueError: If the engine's optimizer states are on NVMe.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        if engine.gradient_accumulation is not None:
            engine.gradient_accumulation.states.put_back()
        self.slots = slots(engine)
        self.shapes = {name: parameter_shape(param) for name, param in engine.module.named_parameters()}

    # -- what there is ----------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """The torch optimizer within upstream's, or None."""
        if self.engine.basic_optimizer is None:
            return None
        return getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)

    def tied(self) -> dict[str, str]:
        """For parameters with several names: the other names, each with the first name."""
        first: dict[nn.Parameter, str] = {}
        names = self.engine.module.named_parameters(remove_duplicate=False)
        return {name: first[param] for name, param in names if first.setdefault(param, name) != name}

    def extra(self) -> dict[str, Any]:
        """The entries of ``state_dict()`` besides parameters: buffers, and extra state of modules."""
        parameters = {*self.shapes, *self.tied(), *self.saved_names.values()}
        # Not the module's own `state_dict()`, which may leave entries out. Its children's may read partitions.
        with access.allowed():
            state = nn.Module.state_dict(self.engine.module)
        return {name: value for name, value in state.items() if name not in parameters}

    @cached_property
    def saved_names(self) -> dict[str, str]:
        """The names of parameters in ``state_dict()``, by their own, where they differ."""
        with access.allowed():
            return saved_names(self.engine.module)

    def group_names(self) -> list[list[str]]:
        """The names of the optimized parameters in each parameter group, sorted."""
        if self.optimizer is None:
            return []
        return [group.names for group in groups(self.engine, self.optimizer, self.slots)]

    def parts(self, with_optimizer: bool) -> Iterator[Part]:
        """What this rank writes to a checkpoint: :meth:`own_parts`, and with the optimizer states the averages."""
        yield from self.own_parts(with_optimizer)
        if with_optimizer:
            for (name, start), average in self.engine.averages.items():
                if average.numel():
                    yield Part(name, AVERAGES, start, average)

    def own_parts(self, with_optimizer: bool) -> Iterator[Part]:
        """The elements that this rank keeps of every parameter, as views or copies.

        Args:
            with_optimizer: With the optimizer states.
        """
        for slot in self.slots:
            if slot.has_weights:
                yield from _split(slot.pieces, None, slot.tensor)
            if with_optimizer and slot.group is not None:
                states = self.optimizer.state.get(slot.tensor, {})
                for key in sorted_states(states, slot.tensor.shape)["elementwise"]:
                    yield from _split(slot.pieces, key, states[key])

    def summary(self, with_optimizer: bool) -> dict[str, Any]:
        """Everything else: plain data and small tensors, identical on all ranks and saved by rank 0."""
        summary: dict[str, Any] = {
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "tied": self.tied(),
            "counters": {name: getattr(self.engine, name) for name in _COUNTERS},
        }
        if self.optimizer is None or not with_optimizer:
            return summary
        states: dict[str, Any] = {}
        for slot in self.slots:
            if slot.group is not None:
                found = sorted_states(self.optimizer.state.get(slot.tensor, {}), slot.tensor.shape)
                states |= dict.fromkeys(slot.members, found)
        if self.engine.gradient_accumulation.split_steps.has_whole_tensors:
            states = self._of_all_ranks(states)
        summary["optimizer"] = {
            "class": name_of(self.optimizer),
            "groups": self.users_groups(),
            "states": states,
        }
        scaler = self._loss_scaler()
        if scaler is not None:
            summary["loss_scale"] = {name: getattr(scaler, name) for name in _LOSS_SCALE if hasattr(scaler, name)}
        return summary

    def users_groups(self) -> list[dict[str, Any]]:
        """The groups as the user made them; see :func:`~lightning_zeroplus.engine.state.groups.described`."""
        names = {param: name for name, param in self.engine.module.named_parameters()}
        return described(groups(self.engine, self.optimizer, self.slots), names)

    def _of_all_ranks(self, states: dict[str, Any]) -> dict[str, Any]:
        """The states of each parameter, from a rank that steps it; a collective."""
        mine = {name for slot in self.slots if slot.group is not None and slot.pieces for name in slot.members}
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, {name: state for name, state in states.items() if name in mine})
        return reduce(lambda others, each: each | others, found)

    def _loss_scaler(self) -> Any:
        if not self.engine.has_loss_scale():
            return None
        if self.engine.loss_scaler is not None:
            return self.engine.loss_scaler
        optimizer = self.engine.optimizer
        return getattr(optimizer, "loss_scale_config", None) or getattr(optimizer, "loss_scaler", None)

    # -- loading ----------------------------------------------------------------------------------------------------

    def buffers_for(self, saved: Mapping[str, Any] | None) -> Staged:
        """Host memory for this rank's weights and the optimizer states that ``saved`` lists.

        Args:
            saved: ``summary()["optimizer"]`` of what will be loaded; None: only the weights.
        """
        accumulation = self.engine.gradient_accumulation
        if saved is not None and any(_differ(slot, saved["states"]) for slot in self.slots):
            accumulation.split_steps.split()
            self.slots = slots(self.engine)
        weights, states = [], []
        for slot in self.slots:
            weights.append(_on_host(slot))
            found = []
            if saved is not None and slot.group is not None:
                found = [saved["states"][name] for name in slot.members if name in saved["states"]]
            dtypes = {
                key: dtype_to_load(each, key) or slot.tensor.dtype for each in found for key in each["elementwise"]
            }
            states.append({key: torch.zeros(slot.tensor.numel(), dtype=dtypes[key]) for key in sorted(dtypes)})
        return Staged(self.slots, weights, states)

    def load(self, staged: Staged, summary: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Load what was read into the engine; a collective. Whatever can fail must have been checked before.

        Args:
            staged: The filled :meth:`buffers_for`.
            summary: The :meth:`summary` of what is loaded. Without ``optimizer``: only the weights.
            extra: The :meth:`extra` of what is loaded.
        """
        optimizer = self.engine.optimizer
        partitions = hasattr(optimizer, "parameter_offload") or isinstance(optimizer, DeepSpeedZeRoOffload)
        if partitions:
            getattr(optimizer, "parameter_offload", optimizer).partition_all_parameters()
        with torch.no_grad():
            for slot, weights in zip(self.slots, staged.weights, strict=True):
                if slot.has_weights:
                    slot.tensor.data.copy_(weights.view(slot.tensor.shape))
            if self.engine.gradient_accumulation is not None:
                self.engine.gradient_accumulation.split_steps.written_back()
        if summary.get("optimizer") is not None:
            self.load_optimizer(staged, summary["optimizer"])
            for name, value in summary.get("counters", {}).items():
                setattr(self.engine, name, value)
            scaler = self._loss_scaler()
            for name, value in summary.get("loss_scale", {}).items():
                if hasattr(scaler, name):
                    setattr(scaler, name, value)
        if self.engine.basic_optimizer is not None:
            _refresh(optimizer)
        if partitions:
            _gather_persistent(optimizer)
        self.engine.module.load_state_dict(dict(extra), strict=False)
        if self.engine.compilation is not None:
            self.engine.compilation.parameters_changed()

    def load_optimizer(self, staged: Staged, saved: Mapping[str, Any]) -> None:
        """Let the torch optimizer load a state dict of the slots by its ``load_state_dict``.

        Args:
            staged: The filled :meth:`buffers_for`; its weights are not used.
            saved: ``summary()["optimizer"]`` of what is loaded.
        """
        optimizer = self.optimizer
        by_group: list[list[int]] = [[] for _ in optimizer.param_groups]
        state = {}
        for index, slot in enumerate(self.slots):
            if slot.group is None:
                continue
            by_group[slot.group].append(index)
            # Without weights and pieces it is another rank's, and so is its state.
            others = _others(slot, saved["states"]) if slot.has_weights or slot.pieces else None
            if others is not None:
                shaped = {key: value.view(slot.tensor.shape) for key, value in staged.states[index].items()}
                state[index] = shaped | others
        kept = [group["params"] for group in optimizer.param_groups]
        for group, indices in zip(optimizer.param_groups, by_group, strict=True):
            group["params"] = [self.slots[index].tensor for index in indices]  # at stage 3, upstream keeps none there
        settings = [each["settings"] for each in _in_order(optimizer, saved["groups"])]
        # Groups of optimizers that share parameters are no groups of the chain, which hands out their settings.
        shares = getattr(optimizer, "shares", False)
        own = [{}] * len(by_group) if shares else settings
        given = [
            settings_of(group) | each | {"params": indices}
            for group, each, indices in zip(optimizer.param_groups, own, by_group, strict=True)
        ]
        try:
            optimizer.load_state_dict(
                {"state": state, "param_groups": given} | ({"settings": settings} if shares else {})
            )
        finally:
            for group, params in zip(optimizer.param_groups, kept, strict=True):
                group["params"] = params
        # Upstream links parameters to views of their optimizer states again in the next step.
        if hasattr(self.engine.optimizer, "_hp_optimizer_states_linked"):
            self.engine.optimizer._hp_optimizer_states_linked = False


def _in_order(optimizer: Any, saved: Sequence[Any]) -> list[Any]:
    """A checkpoint's groups in the order of the torch optimizer's: the first of several may have got one last."""
    if getattr(optimizer, "shares", False) or not all("owner" in each for each in saved):
        return list(saved)
    by_owner: dict[int, list[Any]] = {}
    for each in saved:
        by_owner.setdefault(each["owner"], []).append(each)
    return [by_owner[owner].pop(0) for owner in getattr(optimizer, "owners", [0] * len(saved))]


def by_name(parts: Iterable[Part]) -> dict[tuple[str, str | None], list[Part]]:
    """Group parts by parameter and state."""
    found: dict[tuple[str, str | None], list[Part]] = {}
    for part in parts:
        found.setdefault((part.name, part.state), []).append(part)
    return found


_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


def assemble(mine: Sequence[Part], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Assemble a parameter, or one of its states, from the parts of all ranks; a collective.

    Args:
        mine: This rank's parts.
        shape: The shape of the parameter.
        device: The device of the result.

    Returns:
        The whole, in ``shape`` and in the dtype of the parts, on all ranks; fp32 if no rank has any.
    """
    whole = torch.zeros(torch.Size(shape).numel(), dtype=torch.float32, device=device)
    rank = dist.get_rank()
    # One element more says in which dtype. A rank without a part does not know.
    givers = torch.full((len(whole) + 1,), dist.get_world_size(), dtype=torch.int32, device=device)
    givers[-1] = _DTYPES.index(mine[0].data.dtype) if mine else len(_DTYPES)
    for part in mine:
        whole.narrow(0, part.start, part.data.numel()).copy_(part.data)
        givers.narrow(0, part.start, part.data.numel()).fill_(rank)
    # Several ranks may have the same elements, for example of a frozen parameter. One of them gives them: a mean would
    # be rounded.
    dist.all_reduce(givers, dist.ReduceOp.MIN)
    whole = torch.where(givers[:-1] == rank, whole, 0)
    dist.all_reduce(whole)
    return whole.to((*_DTYPES, torch.float32)[int(givers[-1])]).view(shape)


class Staged(NamedTuple):
    """Host memory that a rank fills before it changes anything: a flat tensor for each slot and each of its states."""

    slots: list[Slot]
    weights: list[Tensor]
    states: list[dict[str, Tensor]]

    def parts(self) -> Iterator[Part]:
        """The parts to fill."""
        for slot, weights, states in zip(self.slots, self.weights, self.states, strict=True):
            if slot.has_weights:
                yield from _split(slot.pieces, None, weights)
            for key, value in states.items():
                yield from _split(slot.pieces, key, value)


def _on_host(slot: Slot) -> Tensor:
    if not slot.has_weights:
        return torch.empty(0, dtype=slot.tensor.dtype)
    return slot.tensor.detach().to("cpu", copy=True).flatten()


def _split(pieces: tuple[Piece, ...], state: str | None, tensor: Tensor) -> Iterator[Part]:
    flat = tensor.detach().flatten()
    for name, start, numel, offset in pieces:
        if numel:
            yield Part(name, state, start, flat.narrow(0, offset, numel))


def _differ(slot: Slot, states: Mapping[str, Any]) -> bool:
    """Whether parameters of a slot have made different numbers of steps: some had no gradient in some steps."""
    made = {_steps(states[name]) if states.get(name, {}).get("others") is not None else None for name in slot.members}
    return slot.group is not None and len(made) > 1


def _steps(states: Mapping[str, Any]) -> tuple[Any, ...]:
    """The numbers of steps of a parameter, one for each optimizer that has made some; and what they have left."""
    counts = {key: float(value) for key, value in states["others"].items() if is_step(key)}
    return *sorted((key, count) for key, count in counts.items() if count), frozenset(states["elementwise"])


def _others(slot: Slot, states: Mapping[str, Any]) -> dict[str, Any] | None:
    """The optimizer states of ``slot`` that are not element by element; None if there was no step yet.

    Parameters of one slot share these states. If their step counts differ, the largest counts.
    """
    found = [states[name] for name in slot.members if states.get(name, {}).get("others") is not None]
    if not found:
        return None
    most = max(found, key=lambda each: sum(float(value) for key, value in each["others"].items() if is_step(key)))
    # A copy: the parameters of one slot must not share a step count that is updated in place.
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in most["others"].items()}


def _refresh(optimizer: Any) -> None:
    """Copy the master weights to the parameters."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
    elif isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        optimizer.update_lp_params()
    elif isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        for param, master in with_masters(optimizer):
            param.data.copy_(master.data)


def _gather_persistent(optimizer: Any) -> None:
    if hasattr(optimizer, "checkpoint_event_epilogue"):
        optimizer.checkpoint_event_epilogue()
    elif optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
