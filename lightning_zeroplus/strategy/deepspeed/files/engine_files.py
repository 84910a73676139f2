"""Between an engine's state and a checkpoint's files: what the Trainer's and Fabric's strategies share."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lightning_zeroplus.checkpoint.compare import check_optimizer, check_parameters
from lightning_zeroplus.checkpoint.fragments import Fragment
from lightning_zeroplus.checkpoint.hooked import Chosen, choose
from lightning_zeroplus.checkpoint.names import renamed_optimizer
from lightning_zeroplus.checkpoint.sources import OPTIMIZER, WEIGHTS, Reader, Source
from lightning_zeroplus.engine.optimizer.chain import name_of

if TYPE_CHECKING:
    from lightning_zeroplus.engine.state.parts import EngineState, Part, Staged


def chosen_of(state_dict: Mapping[str, Any], state: EngineState) -> Chosen:
    """The entries of a module's ``state_dict`` that are saved; tied parameters under their first name."""
    own = {state.saved_names.get(name, name): name for name in [*state.shapes, *state.tied()]}
    parameters = dict(state.engine.module.named_parameters(remove_duplicate=False))
    kept, extra = choose(state_dict, {name: parameters[own[name]] for name in own}, state.extra().keys())
    first = state.tied()
    return Chosen(frozenset(first.get(own[name], own[name]) for name in kept), extra)


def summary_of(state: EngineState, with_optimizer: bool, kept: Collection[str]) -> dict[str, Any]:
    """The engine's ``summary()``, with the weights that are saved, by the names in a file. All ranks call it.

    Args:
        state: The engine's.
        with_optimizer: With the optimizer states.
        kept: Names of parameters.
    """
    summary, names = state.summary(with_optimizer), state.saved_names
    shapes, tied = summary["shapes"].items(), summary["tied"].items()
    summary["shapes"] = {names.get(name, name): shape for name, shape in shapes if name in kept}
    summary["tied"] = {names.get(name, name): names.get(first, first) for name, first in tied if first in kept}
    if names and "optimizer" in summary:
        summary["optimizer"] = renamed_optimizer(summary["optimizer"], names)
    return summary


def checked_extra(source: Source, state: EngineState, strict: bool) -> dict[str, Any]:
    """The entries of a checkpoint that are loaded besides parameters. It may lack frozen weights that it names.

    Raises:
        RuntimeError: If its parameters and buffers are not those of the engine.
    """
    names = state.shapes | {name: state.shapes[first] for name, first in state.tied().items()}
    extra, wanted = source.extra(names), state.extra()
    saved = {name: source.shapes()[name] for name in source.shapes().keys() - extra.keys()}
    needed = {name: shape for name, shape in names.items() if name in saved or name not in source.frozen}
    buffers = {name for name, _ in state.engine.module.named_buffers(remove_duplicate=False)}
    check_parameters(str(source.path), saved | _shapes(extra, buffers), needed | _shapes(wanted, buffers), strict)
    return {name: extra[name] for name in extra.keys() & wanted.keys()}


def frozen_with_states(saved: Mapping[str, Any] | None, state: EngineState) -> set[str]:
    """Names of parameters whose optimizer states are in a checkpoint, and that are frozen now.

    Under DDP a state waits until its parameter is unfrozen; ``engine.keep_states_of`` makes room for it.

    Args:
        saved: The ``optimizer`` of the checkpoint's summary; None: it has none.
        state: The engine's.
    """
    if saved is None or state.optimizer is None:
        return set()
    members = {name for group in state.users_groups() for name in group["shapes"]}
    trained = {name for group in state.group_names() for name in group}
    return {name for group in saved["groups"] for name in group["names"]} & members - trained


def staged_from(
    weights: Source | None, optimizer: Reader | None, state: EngineState, summary: Mapping[str, Any]
) -> Staged:
    """Read the parts that this rank needs into host memory.

    Args:
        weights: Where the weights are; None: they stay.
        optimizer: Where the optimizer states are; None: they stay.
        state: The engine's.
        summary: What is loaded. Its ``optimizer`` is None, or fits ``optimizer``.

    Raises:
        RuntimeError: If the optimizer does not fit, or a file is damaged.
    """
    if summary["optimizer"] is not None:
        assert optimizer is not None
        torch_optimizer = state.optimizer
        check_optimizer(
            str(optimizer.path),
            summary["optimizer"],
            name_of(torch_optimizer),
            state.group_names(),
            torch_optimizer.defaults,
        )
    staged = state.buffers_for(summary["optimizer"])
    parts = list(staged.parts())
    if weights is not None:
        weights.read(_fragments([part for part in parts if part.state is None], state))
    if optimizer is not None:
        optimizer.read(_fragments([part for part in parts if part.state is not None], state))
    return staged


def fragments_to_save(parts: Iterable[Part], state: EngineState, prefix: str = "") -> list[Fragment]:
    """Parts of an engine's state as parts of files; ``prefix`` tells one engine's tensors from another's."""
    return _fragments(parts, state, state.saved_names, prefix)


def _fragments(
    parts: Iterable[Part], state: EngineState, names: Mapping[str, str] = MappingProxyType({}), prefix: str = ""
) -> list[Fragment]:
    def key(part: Part) -> str:
        name = names.get(part.name, part.name)
        return f"{prefix}{WEIGHTS}{name}" if part.state is None else f"{prefix}{OPTIMIZER}{name}/{part.state}"

    return [Fragment(key(part), (part.start,), (math.prod(state.shapes[part.name]),), part.data) for part in parts]


def _shapes(extra: Mapping[str, Any], buffers: Collection[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of buffers, and () of other entries: modules that save a tensor themselves may load any shape."""
    return {name: tuple(value.shape) if name in buffers else () for name, value in extra.items()}
