"""Checkpoints of ZeroPlusFabricStrategy: atomic, read without executing code, for any stage and any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _validate_keys_for_strict_loading
from lightning.fabric.utilities.types import _PATH, _Stateful
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_zeroplus.checkpoint.everywhere import everywhere
from lightning_zeroplus.checkpoint.fabric.opened import FabricCheckpoint, load_raw, prefix_of
from lightning_zeroplus.checkpoint.fabric.sources import JoinedOptimizers, RenamedSource, WholeSource
from lightning_zeroplus.checkpoint.hooked import Chosen, changes_what_it_loads, loading_as_it_is, what_it_loads
from lightning_zeroplus.checkpoint.sources import FABRIC
from lightning_zeroplus.engine.optimizer.chain import name_of, parts_of
from lightning_zeroplus.strategy.common.saves import SavesAtomically
from lightning_zeroplus.strategy.deepspeed.fabric_modules import engine_and_part, engine_of
from lightning_zeroplus.strategy.deepspeed.files.engine_files import (
    checked_extra,
    chosen_of,
    fragments_to_save,
    frozen_with_states,
    staged_from,
    summary_of,
)
from lightning_zeroplus.strategy.deepspeed.files.filters import Filter, filtered

if TYPE_CHECKING:
    from lightning_zeroplus.checkpoint.fragments import Fragment
    from lightning_zeroplus.checkpoint.sources import Source
    from lightning_zeroplus.engine.engine import ZeroPlusEngine
    from lightning_zeroplus.engine.state.parts import EngineState, Staged


class _Named(NamedTuple):
    """What the user has named of one engine.

    Attributes:
        engine: The engine.
        models: Names of the module.
        optimizers: The number of each optimizer, by name.
    """

    engine: ZeroPlusEngine
    models: list[str]
    optimizers: dict[str, int]


class FabricFiles(SavesAtomically, DDPStrategy):
    """Mixin for a strategy of Fabric: ``fabric.save``, ``fabric.load`` and ``fabric.load_raw``.

    The files are those of :class:`.CheckpointingStrategy`. Every rank writes the parts that it has, and reads the parts
    that it needs.
    """

    _engines: list[ZeroPlusEngine]
    _evaluated: list[ZeroPlusEngine]  # without an optimizer

    # -- saving -----------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self,
        path: _PATH,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: Mapping[str, Filter] | None = None,
    ) -> None:
        """Save models, optimizers, and what else is in ``state``. The folder replaces an old one when it is complete.

        Args:
            path: The folder, or an address such as ``s3://bucket/last.ckpt``.
            state: By the user's names. Of what has a ``state_dict()``, that is saved.
            storage_options: Refused.
            filter: By names in ``state``: which entries of a ``state_dict()`` are saved. Rank 0 decides.

        Raises:
            TypeError: If ``storage_options`` is given.
            ValueError: If ``path`` is an address that cannot be used, something is named ``"zeroplus"``, a model or an
                optimizer is in a list or a dict, or a model with a filter has two names.
            Exception: On every rank, if saving failed on one. The old checkpoint stays.
        """
        from lightning_zeroplus.engine.state.parts import EngineState

        if storage_options is not None:
            raise TypeError(f"`{type(self).__name__}` saves without a `CheckpointIO`: remove `storage_options`.")
        if "zeroplus" in state:
            raise ValueError("`fabric.save`: the name 'zeroplus' is taken. Choose another one.")
        place = self._place(path)
        filters = dict(filter or {})
        # A filter sees the whole state of an optimizer, which is then saved whole.
        whole = {name for name, value in state.items() if name in filters and isinstance(value, Optimizer)}
        named = self._by_engine({name: value for name, value in state.items() if name not in whole})
        sharded = _names(named)
        others = {name: value for name, value in state.items() if name not in sharded}
        self._check_not_nested(others)
        rest = everywhere(lambda: self._convert_stateful_objects_in_state(others, filters))
        states = everywhere(lambda: [EngineState(each.engine) for each in named])
        chosen = [self._chosen(each, own, filters) for each, own in zip(named, states, strict=True)]

        def fragments() -> Iterator[Fragment]:
            for number, (each, own, (entries, _)) in enumerate(zip(named, states, chosen, strict=True)):
                parts = own.parts(bool(each.optimizers))
                wanted = (part for part in parts if part.state is not None or part.name in entries.kept)
                yield from fragments_to_save(wanted, own, prefix_of(number))

        models = [_described(each, own, *found) for each, own, found in zip(named, states, chosen, strict=True)]
        self._save_folder(place, fragments(), rest | {"zeroplus": {"format": FABRIC, "models": models}})

    def _chosen(self, named: _Named, state: EngineState, filters: Mapping[str, Filter]) -> tuple[Chosen, list[str]]:
        """The entries of a model that are saved, and all their names in order."""
        from lightning_zeroplus.weights.partitioned import access

        if not named.models:
            return Chosen(frozenset(), {}), []
        keep = filters.get(named.models[0])
        if len(named.models) > 1 and not filters.keys().isdisjoint(named.models):
            raise ValueError(
                f"`fabric.save(filter=...)`: {' and '.join(map(repr, named.models))} are the same model, which is"
                " saved once. Give it one name."
            )
        with access.allowed():  # the user's `state_dict()` may leave out entries
            entries = everywhere(named.engine.module.state_dict)
            found = everywhere(lambda: chosen_of(entries, state))
        if keep is not None:
            found = filtered(found, named.engine.module, state.saved_names, keep)
        return found._replace(kept=self.broadcast(found.kept)), list(entries)

    # -- loading ----------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(
        self, path: _PATH, state: Any | None = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint of any stage and number of ranks; or a file with the state dict of one object.

        Args:
            path: A folder of :meth:`save_checkpoint` or of the Trainer's strategy; or a file that Fabric or the Trainer
                have saved under another strategy. For :meth:`lightning.fabric.Fabric.load_raw` a file with one state
                dict, as ``torch.save`` or safetensors write it. Also at an address, such as ``s3://bucket/last.ckpt``.
            state: What is to be loaded, by the names in the checkpoint. None: return everything, whole. One module or
                optimizer: load the only state dict in the file.
            strict: The checkpoint must have all names, and all parameters and buffers of a model and no others.
            weights_only: False unpickles whatever the checkpoint contains, and so may execute code from it.

        Returns:
            What else is in the checkpoint and is not sharded; or everything.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            KeyError: If it lacks a name.
            RuntimeError: On every rank, if it is damaged or does not fit; nothing sharded has been loaded.
            ValueError: If only some of the optimizers of one model are named.
        """
        data_only = weights_only is not False
        files = self._readable(path)
        if isinstance(state, (nn.Module, Optimizer)):
            self._load_raw(state, files, strict, data_only)
            return {}
        saved = everywhere(lambda: FabricCheckpoint(files, data_only))
        if not state:
            return everywhere(lambda: {name: saved.value(name) for name in saved.names})
        everywhere(lambda: _validate_keys_for_strict_loading(state.keys(), saved.names, strict))
        wanted = {name: value for name, value in state.items() if name in saved.names}
        named = self._by_engine(wanted)
        self._load_engines(everywhere(lambda: [_planned(each, saved, strict) for each in named]))
        sharded = _names(named)
        values = everywhere(lambda: {name: saved.value(name) for name in wanted if name not in sharded})
        for name, value in values.items():
            self._load_value(state, name, value, strict)
        return everywhere(lambda: saved.others(wanted))

    def _load_value(self, state: dict[str, Any], name: str, value: Any, strict: bool) -> None:
        target = state[name]
        if isinstance(target, nn.Module):
            self.load_module_state_dict(target, value, strict)
        elif isinstance(target, _Stateful):
            target.load_state_dict(value)
        else:
            state[name] = value

    def _load_raw(self, target: nn.Module | Optimizer, path: Any, strict: bool, data_only: bool) -> None:
        found = everywhere(lambda: load_raw(path, data_only))
        engine = self._engine_in(target)
        if engine is not None:
            weights, strict = everywhere(lambda: _changed(engine, WholeSource(path, found), lambda: found, strict))
            self._load_engines([_Plan(engine, weights, None, {"optimizer": None}, strict)])
        elif isinstance(target, nn.Module):
            self.load_module_state_dict(target, found, strict)
        else:
            shown = self._shown(target)
            getattr(shown, "load_whole_state_dict", shown.load_state_dict)(found)

    @staticmethod
    def _load_engines(plans: list[_Plan]) -> None:
        """Read for all engines, and load when every rank has read everything."""
        from lightning_zeroplus.engine.state.parts import EngineState

        states = everywhere(lambda: [EngineState(plan.engine) for plan in plans])
        frozen = [frozen_with_states(plan.summary["optimizer"], own) for plan, own in zip(plans, states, strict=True)]
        for number, (plan, names) in enumerate(zip(plans, frozen, strict=True)):
            if names:
                plan.engine.keep_states_of(names)
                states[number] = EngineState(plan.engine)
        staged = everywhere(lambda: [plan.read(state) for plan, state in zip(plans, states, strict=True)])
        for plan, state, (parts, extra) in zip(plans, states, staged, strict=True):
            with loading_as_it_is(plan.engine.module):
                state.load(parts, plan.summary, extra)

    # -- modules ----------------------------------------------------------------------------------------------------

    def _engine_in(self, value: Any) -> ZeroPlusEngine | None:
        return engine_of(value, [*self._engines, *self._evaluated])

    def _by_engine(self, state: Mapping[str, Any]) -> list[_Named]:
        """Models and optimizers that were set up, in the order of their first names."""
        found: dict[int, _Named] = {}
        for name, value in state.items():
            engine, optimizer = self._engine_in(value), engine_and_part(value, self._engines)
            if engine is not None:
                found.setdefault(id(engine), _Named(engine, [], {})).models.append(name)
            elif optimizer is not None:
                engine, number = optimizer
                found.setdefault(id(engine), _Named(engine, [], {})).optimizers[name] = number
        return list(found.values())

    def _check_not_nested(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            nested = [each for each in tree_leaves(value) if each is not value and self._by_engine({name: each})]
            if nested:
                raise ValueError(
                    f"`fabric.save`: `state[{name!r}]` is a {type(value).__name__} that has a"
                    f" {type(nested[0]).__name__}, of which each rank has a part. Give it a name of its own in `state`."
                )

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load whole tensors into the module of an engine, too."""
        engine = self._engine_in(module)
        super().load_module_state_dict(module if engine is None else engine.module, state_dict, strict)

    def _shown(self, optimizer: Optimizer) -> Optimizer:
        """What the user steps, of a torch optimizer that was set up, too."""
        found = engine_and_part(optimizer, self._engines)
        return optimizer if found is None else found[0].shown_optimizers()[found[1]]

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state of an optimizer, as under DDP. All ranks call it."""
        shown = self._shown(optimizer)
        own: Callable[[], dict[str, Any]] | None = getattr(shown, "whole_state_dict", None)
        return super().get_optimizer_state(shown) if own is None else own()

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The whole tensors of a module, also of an engine's."""
        engine = self._engine_in(module)
        return super().get_module_state_dict(module if engine is None else engine.module)


class _Plan(NamedTuple):
    """What is loaded into an engine.

    Attributes:
        engine: The engine.
        weights: Where its weights are; None: they stay.
        optimizer: Where its optimizer states are; None: they stay.
        summary: What else is loaded of the optimizer.
        strict: The names of parameters and buffers must be the same.
    """

    engine: ZeroPlusEngine
    weights: Source | None
    optimizer: JoinedOptimizers | None
    summary: dict[str, Any]
    strict: bool

    def read(self, state: EngineState) -> tuple[Staged, dict[str, Any]]:
        """What this rank needs, in host memory, and what is not sharded."""
        extra = {} if self.weights is None else checked_extra(self.weights, state, self.strict)
        return staged_from(self.weights, self.optimizer, state, self.summary), extra


def _changed(engine: ZeroPlusEngine, weights: Source, whole: Callable[[], Any], strict: bool) -> tuple[Source, bool]:
    """The weights, and how strictly they are loaded, after the user's overrides and hooks of ``load_state_dict``."""
    from lightning_zeroplus.engine.state.parts import EngineState

    names = EngineState(engine).saved_names
    if changes_what_it_loads(engine.module):
        loaded = what_it_loads(engine.module, whole(), strict)
        weights, strict = WholeSource(weights.path, loaded.state), loaded.strict
    names = {name: saved for name, saved in names.items() if saved in weights.shapes()}
    return RenamedSource(weights, names) if names else weights, strict


def _planned(named: _Named, saved: FabricCheckpoint, strict: bool) -> _Plan:
    from lightning_zeroplus.engine.state.parts import EngineState

    weights = None
    if named.models:
        name = named.models[0]
        weights, strict = _changed(named.engine, saved.model(name), lambda: saved.value(name), strict)
    if not named.optimizers:
        return _Plan(named.engine, weights, None, {"optimizer": None}, strict)
    state = EngineState(named.engine)
    parts = parts_of(state.optimizer)
    by_part = {part: name for name, part in named.optimizers.items()}
    if len(by_part) != len(parts):
        raise ValueError(
            f"`fabric.load` of {', '.join(map(repr, named.optimizers))}: the model has {len(parts)} optimizers, whose"
            " states are loaded together. Name all of them in `state`."
        )
    trained = {name for group in state.group_names() for name in group}
    groups = [(group["owner"], list(group["shapes"])) for group in state.users_groups()]
    found = []
    for number in range(len(parts)):
        own = [names for owner, names in groups if owner == number]
        found.append(saved.optimizer(by_part[number], own, trained, state.shapes).renamed(state.saved_names))
    joined = JoinedOptimizers(saved.path, found, [owner for owner, _ in groups])
    return _Plan(named.engine, weights, joined, joined.summary, strict)


def _described(named: _Named, state: EngineState, chosen: Chosen, order: list[str]) -> dict[str, Any]:
    """What is saved of an engine besides sharded tensors. All ranks call it."""
    parts = parts_of(state.optimizer)
    return {
        "names": named.models,
        "optimizers": {
            name: {"class": name_of(parts[number]), "number": number} for name, number in named.optimizers.items()
        },
        "engine": summary_of(state, bool(named.optimizers), chosen.kept),
        "extra": chosen.extra,
        "order": order,
    }


def _names(named: list[_Named]) -> set[str]:
    return {name for each in named for name in (*each.models, *each.optimizers)}
