"""Loading a sharded module from a folder or a file: nothing changes before every rank has read its part."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, load
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_zeroplus.checkpoint.compare import check_parameters
from lightning_zeroplus.checkpoint.data_only import DataOnlyPlanner, DataOnlyReader, read_metadata
from lightning_zeroplus.checkpoint.everywhere import errors_of_torch, everywhere
from lightning_zeroplus.checkpoint.hooked import saved_names
from lightning_zeroplus.checkpoint.names import of_fsdp
from lightning_zeroplus.checkpoint.numbered import states_by_name
from lightning_zeroplus.checkpoint.places.address import Files
from lightning_zeroplus.fsdp.whole.parameters import stepped_as_whole
from lightning_zeroplus.weights.trainable import made_trainable

WEIGHTS = "state_dict."


class Staged(NamedTuple):
    """The state that was read for a module and its optimizers."""

    weights: dict[str, Any]
    optimizers: list[dict[str, Any]]


def name_by_torch(name: str) -> str:
    """The name of a parameter in ``torch.distributed.checkpoint``, without those of wrappers."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def named_by_torch(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters by their names in ``torch.distributed.checkpoint``; a tied one under each of its names."""
    return ((name_by_torch(name), param) for name, param in module.named_parameters(remove_duplicate=False))


def others_of(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of the ``state_dict()`` of ``module`` that are neither parameters nor buffers.

    Examples are an ``_extra_state``, and the states of a metric. They may be lists, whose parts torch would save by
    themselves, and tensors whose shape changes in a fit.
    """
    buffers = (name_by_torch(name) for name, _ in module.named_buffers(remove_duplicate=False))
    named = {*buffers, *(name for name, _ in named_by_torch(module)), *saved_names(module).values()}
    return {
        name: value
        for name, value in weights.items()
        if not isinstance(value, Tensor) or not (isinstance(value, (DTensor, nn.Parameter)) or name in named)
    }


def read_distributed(
    folder: Files,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    strict: bool = True,
    without: Collection[str] = (),
    only_data: bool = True,
    others: Mapping[str, Any] = MappingProxyType({}),
) -> Staged:
    """Read ``state_dict`` and ``optimizer_0``, ``optimizer_1``, ... into new tensors, at any world size; a collective.

    Args:
        folder: The checkpoint.
        module: A sharded module, or a module with sharded children.
        optimizers: The module's optimizers, in the order in which they were saved.
        strict: Refuse a checkpoint that does not have exactly the module's tensors.
        without: Names of weights that the checkpoint has left out.
        only_data: Refuse a checkpoint that contains anything but tensors and plain data. False may execute its code.
        others: What has been read already of its ``state_dict``, see :func:`others_of`.

    Raises:
        RuntimeError: On every rank, if the checkpoint contains more than it may, is damaged, or does not fit.
    """
    weights = {name: value for name, value in get_model_state_dict(module).items() if name not in without}

    def check() -> None:
        saved = _shapes(read_metadata(folder)) | dict.fromkeys(others, ())
        wanted = {name: () if name in others else _shape(value) for name, value in weights.items()}
        check_parameters(str(folder), saved, wanted, strict)

    everywhere(check)
    stored = {name: value for name, value in weights.items() if name not in others}
    state: dict[str, Any] = {"state_dict": _copy(stored)}
    _load(folder, state, only_data, allow_partial_load=not strict)
    own = {name: value for name, value in others.items() if name in weights}
    return Staged({**state["state_dict"], **own}, read_optimizers(folder, module, optimizers, only_data=only_data))


def read_whole_weights(folder: Files, prefix: str = WEIGHTS) -> dict[str, Tensor]:
    """Read the weights as whole tensors, in host memory of every rank.

    Args:
        folder: The checkpoint.
        prefix: What their names begin with there.

    Raises:
        RuntimeError: On every rank, if the checkpoint is damaged or contains anything but tensors and plain data.
    """
    stored = read_metadata(folder).state_dict_metadata
    whole = {
        name.removeprefix(prefix): torch.empty(tuple(value.size), dtype=value.properties.dtype)
        for name, value in stored.items()
        if name.startswith(prefix) and not isinstance(value, BytesStorageMetadata)
    }
    _load(folder, {prefix.removesuffix("."): whole})
    return whole


def read_optimizers(
    folder: Files,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    earlier: Mapping[str, str] = MappingProxyType({}),
    only_data: bool = True,
) -> list[dict[str, Any]]:
    """Read ``optimizer_0``, ``optimizer_1``, ... into new tensors; see :func:`read_distributed`.

    Args:
        folder: The checkpoint.
        module: The sharded module.
        optimizers: Its optimizers.
        earlier: Names of parameters in the checkpoint, by their names in the module, where they differ.
        only_data: As of :func:`read_distributed`.

    Raises:
        RuntimeError: On every rank, if it has states of parameters that the module does not have.
    """
    states = []
    stored = read_metadata(folder).state_dict_metadata
    # A hook that renames weights when they are saved, and back, does not see the states, which have their own names.
    earlier = {new: name for new, name in earlier.items() if not _has_states_of(new, stored, len(optimizers))}
    now = {name: new for new, name in earlier.items()}
    known = {earlier.get(name, name) for name, _ in named_by_torch(module)}
    for index, optimizer in enumerate(optimizers):
        key = f"optimizer_{index}"
        saved = {now.get(name, name) for name in _owners(stored, key, known).values() if name is not None}
        with _with_states_of(saved, module, optimizer), without_first_step(optimizer):
            part = {key: _copy(get_optimizer_state_dict(module, optimizer))}
        for group in part[key]["param_groups"]:
            group["params"] = [earlier.get(name, name) for name in group["params"]]
            known.update(group["params"])
        everywhere(partial(_check_states, str(folder), _owners(stored, key, known)))
        # Parameters that no step had changed when it was saved have no state.
        made = {earlier.get(name, name): state for name, state in part[key].pop("state").items()}
        nested = {name[: match.start()] for name in stored for match in re.finditer(r"\.|$", name)}
        there = {name: s for name, s in made.items() if any(f"{key}.state.{name}.{each}" in nested for each in s)}
        if there:
            part[key]["state"] = there
        added = _take_out_added(part[key]["param_groups"], f"{key}.param_groups", stored)
        _load(folder, part, only_data)
        for group, settings in zip(part[key]["param_groups"], added, strict=True):
            group.update(settings)
            group["params"] = [now.get(name, name) for name in group["params"]]
        found = {now.get(name, name): state for name, state in part[key].get("state", {}).items()}
        states.append({"state": found, "param_groups": part[key]["param_groups"]})
    return states


def _has_states_of(name: str, stored: Iterable[str], optimizers: int) -> bool:
    beginnings = tuple(f"optimizer_{index}.state.{name}." for index in range(optimizers))
    return any(each.startswith(beginnings) for each in stored)


def _owners(stored: Iterable[str], key: str, known: Collection[str]) -> dict[str, str | None]:
    """For each state of the optimizer under ``key``, named ``PARAMETER.STATE``, which of ``known`` it belongs to."""
    owners = {}
    for name in stored:
        if name.startswith(f"{key}.state."):
            parts = name.removeprefix(f"{key}.state.").split(".")
            beginnings = (".".join(parts[:count]) for count in range(1, len(parts)))
            owners[".".join(parts)] = next((each for each in beginnings if each in known), None)
    return owners


def _check_states(path: str, owners: Mapping[str, str | None]) -> None:
    for name, owner in owners.items():
        if owner is None:
            raise RuntimeError(
                f"The checkpoint {path!r} has an optimizer's state of {name.rpartition('.')[0]!r}, which the module"
                " does not have. To start anew from its weights, write them to a file with `lightning_zeroplus.export`"
                " and pass that file. Nothing has been loaded."
            )


@contextmanager
def _with_states_of(names: Collection[str], module: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Let torch make and load the states of these parameters, which a checkpoint has.

    torch leaves out the states of frozen parameters. Under DDP these wait until the parameters are unfrozen.
    """
    with (
        made_trainable(param for name, param in named_by_torch(module) if name in names),
        stepped_as_whole(optimizer),
    ):
        yield


def read_averages(folder: Files, averages: Mapping[str, Tensor]) -> None:
    """Read averages of weights into tensors that are sharded like the parameters; a collective.

    Args:
        folder: The checkpoint.
        averages: By :func:`name_by_torch`. Those that the checkpoint does not have stay as they are.
    """
    stored = read_metadata(folder).state_dict_metadata
    _load(folder, {of_fsdp(name): value for name, value in averages.items() if of_fsdp(name) in stored})


@contextmanager
def without_first_step(optimizer: Optimizer) -> Iterator[None]:
    """Clear the state of an optimizer that has not stepped, on exit.

    Where torch reads a state, it lets such an optimizer step with zero gradients to create one, and Adam counts the
    step.
    """
    has_stepped = bool(optimizer.state)
    yield
    if not has_stepped:
        optimizer.state.clear()


@contextmanager
def without_departed(optimizer: Optimizer, module: nn.Module) -> Iterator[None]:
    """Leave parameters out that have left ``module`` since the fit began: torch finds no name for them.

    Args:
        optimizer: Of the module's parameters; it has all of them again on exit.
        module: The sharded module.
    """
    there = set(module.parameters())
    lists = [group["params"] for group in optimizer.param_groups]
    departed = {param for params in lists for param in params} - there
    states = {param: optimizer.state.pop(param) for param in departed & optimizer.state.keys()}
    for group, params in zip(optimizer.param_groups, lists, strict=True):
        group["params"] = [param for param in params if param in there] if departed else params
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = params
        optimizer.state.update(states)


def _take_out_added(groups: list[dict[str, Any]], prefix: str, stored: Iterable[str]) -> list[dict[str, Any]]:
    """Remove settings of groups that the checkpoint does not have: for example, schedulers add ``initial_lr``.

    Args:
        groups: The parameter groups; changed in place.
        prefix: The name of the list of groups in the checkpoint.
        stored: All names in the checkpoint.

    Returns:
        What was removed, by group.
    """
    own = (name.removeprefix(f"{prefix}.") for name in stored if name.startswith(f"{prefix}."))
    known = {tuple(name.split(".")[:2]) for name in own}
    added = []
    for index, group in enumerate(groups):
        added.append({name: value for name, value in group.items() if (str(index), name) not in known})
        for name in added[-1]:
            del group[name]
    return added


def load_staged(staged: Staged, module: nn.Module, optimizers: Sequence[Optimizer], strict: bool = True) -> None:
    """Load what :func:`read_distributed` has read into the module and its optimizers."""
    set_model_state_dict(module, staged.weights, options=StateDictOptions(strict=strict))
    for optimizer, state in zip(optimizers, staged.optimizers, strict=True):
        with _with_states_of(state["state"], module, optimizer):
            options = StateDictOptions(strict=False)
            set_optimizer_state_dict(module, optimizer, optim_state_dict=state, options=options)
        _keep_states(module, optimizer, state["state"])


def load_full_weights(
    path: Files, weights: Mapping[str, Tensor], module: nn.Module, strict: bool = True, without: Collection[str] = ()
) -> None:
    """Load whole tensors, which every rank has, into a sharded module; see :func:`check_full_weights`.

    Raises:
        RuntimeError: On every rank, if names or shapes differ.
    """
    check_full_weights(path, weights, module, strict, without)
    options = StateDictOptions(full_state_dict=True, strict=strict and not without)
    set_model_state_dict(module, dict(weights), options=options)


def name_full_states(
    path: Files, saved: Sequence[Mapping[str, Any]], module: nn.Module, optimizers: Sequence[Optimizer]
) -> list[dict[str, Any]]:
    """State dicts of whole tensors, with names of parameters in place of their numbers.

    A torch optimizer numbers its parameters in the order of its groups. torch and Lightning would take the number for
    the parameter's place in the module, and exchange states if the orders differ.

    Args:
        path: The checkpoint, for the message.
        saved: The optimizers' state dicts.
        module: The sharded module.
        optimizers: Its optimizers.

    Raises:
        RuntimeError: On every rank, if numbers of optimizers or sizes of their groups differ.
    """
    if not optimizers:
        return []
    if len(saved) != len(optimizers):
        raise RuntimeError(
            f"The checkpoint {str(path)!r} does not hold states of {len(optimizers)} optimizers. To start from its"
            " weights, write them to a file with `lightning_zeroplus.export`, and pass that file."
        )
    names: dict[nn.Parameter, str] = {}
    for name, param in named_by_torch(module):
        names.setdefault(param, name)
    named = []
    for optimizer, state in zip(optimizers, saved, strict=True):
        groups = [[names[param] for param in group["params"]] for group in optimizer.param_groups]
        states = states_by_name(str(path), state, groups)
        settings = zip(state["param_groups"], groups, strict=True)
        named.append({"state": states, "param_groups": [{**group, "params": own} for group, own in settings]})
    return named


def load_full_states(named: Sequence[dict[str, Any]], module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Load what :func:`name_full_states` has returned into the optimizers of a sharded module."""
    options = StateDictOptions(full_state_dict=True, strict=False)
    for optimizer, state in zip(optimizers, named, strict=True):
        with _with_states_of(state["state"], module, optimizer):
            set_optimizer_state_dict(module, optimizer, optim_state_dict=state, options=options)
        _keep_states(module, optimizer, state["state"])


def _keep_states(module: nn.Module, optimizer: Optimizer, loaded: Collection[str]) -> None:
    """Remove the states that were not loaded: torch has made them, by a step with zero gradients."""
    kept = {id(param) for name, param in named_by_torch(module) if name in loaded}
    for param in [param for param in optimizer.state if id(param) not in kept]:
        del optimizer.state[param]


def check_full_weights(
    path: Files, weights: Mapping[str, Any], module: nn.Module, strict: bool = True, without: Collection[str] = ()
) -> None:
    """Compare names and shapes of whole tensors with the weights of a sharded module, but for those ``without``.

    Raises:
        RuntimeError: On every rank, if they differ.
    """
    state = get_model_state_dict(module)
    free = others_of(module, state)  # of any shape
    shapes = {name: () if name in free else _shape(value) for name, value in weights.items()}
    own = {saved: name_by_torch(name) for name, saved in saved_names(module).items()}
    found = ((own.get(name, name), value) for name, value in state.items())
    wanted = {name: () if name in free else _shape(value) for name, value in found if name not in without}
    everywhere(lambda: check_parameters(str(path), shapes, wanted, strict))


def _shape(value: Any) -> tuple[int, ...]:
    """Of a tensor; nothing is compared of other values in a ``state_dict``."""
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _shapes(metadata: Metadata) -> dict[str, Sequence[int]]:
    return {
        name.removeprefix(WEIGHTS): () if isinstance(stored, BytesStorageMetadata) else tuple(stored.size)
        for name, stored in metadata.state_dict_metadata.items()
        if name.startswith(WEIGHTS)
    }


def _copy(state: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), state)


def _load(path: Files, state: dict[str, Any], only_data: bool = True, **kwargs: Any) -> None:
    planner = DataOnlyPlanner if only_data else DefaultLoadPlanner
    with errors_of_torch(f"The checkpoint {str(path)!r} cannot be loaded"):
        load(state, storage_reader=DataOnlyReader(path), planner=planner(**kwargs))
