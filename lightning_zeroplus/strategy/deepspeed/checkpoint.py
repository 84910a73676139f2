"""Checkpoints of ZeroPlusStrategy: atomic, read without executing code, for any stage and any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zeroplus.checkpoint.everywhere import everywhere
from lightning_zeroplus.checkpoint.hooked import (
    Chosen,
    Placeholders,
    changes_what_it_loads,
    loading_as_it_is,
    saved_names,
    what_it_loads,
)
from lightning_zeroplus.checkpoint.saving.frozen import Fingerprint, plain
from lightning_zeroplus.checkpoint.sources import (
    FORMAT,
    HOOKED,
    WITHOUT_FROZEN,
    FileSource,
    FolderSource,
    HookedSource,
    Source,
    open_checkpoint,
)
from lightning_zeroplus.engine.optimizer.chain import all_groups
from lightning_zeroplus.strategy.common.modules import begin_fit, log_graphs, metrics_to
from lightning_zeroplus.strategy.common.saves import SavesAtomically
from lightning_zeroplus.strategy.deepspeed.allowed_callbacks import restore_groups
from lightning_zeroplus.strategy.deepspeed.files.engine_files import (
    checked_extra,
    chosen_of,
    fragments_to_save,
    frozen_with_states,
    staged_from,
    summary_of,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_zeroplus.engine.engine import ZeroPlusEngine
    from lightning_zeroplus.engine.state.parts import EngineState


class CheckpointingStrategy(SavesAtomically, DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy with checkpoints of its own.

    DeepSpeed's checkpoints hold the flat partitions of one stage and one number of ranks, in pickles. These hold
    parameters and their optimizer states by name, in the files of ``torch.distributed.checkpoint``. Every rank writes
    the parts that it has, and reads the parts that it needs. DeepSpeed's universal checkpoints would need a conversion,
    by code that unpickles without restriction, and do not support stage 0.
    """

    _pending: Source | None = None
    _placeholders: Placeholders | None = None
    _is_strict = True
    _has_failed = False
    _parameter_groups: Sequence[Sequence[str]] = ()

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """False: hooks and callbacks see a checkpoint at the same time as under DDP; ``setup()`` loads the weights.

        With True the Trainer would not pass ``weights_only`` on.
        """
        return False

    @override
    def connect(self, model: pl.LightningModule) -> None:
        self._pending = self._placeholders = None
        self._is_strict, self._has_failed = True, False
        super().connect(model)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._check_saves(trainer)
        begin_fit(self, trainer)
        if self.zero_stage_3:
            log_graphs(trainer)
        super().setup(trainer)
        self._note_frozen()
        source, self._pending = self._pending, None
        if source is not None:
            groups = cast("ZeroPlusEngine", self.model).user_groups
            if groups is not None:
                restore_groups(trainer, groups.trained)
            self._restore(source)

    def note_parameter_groups(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Remember the optimizer's groups by name, before the engine flattens them."""
        names = {param: name for name, param in model.named_parameters()}
        groups = [] if optimizer is None else all_groups(optimizer)
        self._parameter_groups = [[names[param] for param in group["params"]] for group in groups]

    # -- after the fit ----------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Remember that the ranks must not communicate any more: perhaps only this one has failed."""
        self._has_failed = True
        super().on_exception(exception)

    # -- saving -----------------------------------------------------------------------------------------------------

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return nothing: :meth:`save_checkpoint` gets the state from the engine."""
        return {}

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The names of the weights. :meth:`save_checkpoint` gets this rank's parts from the engine."""
        from lightning_zeroplus.weights.partitioned import access

        # The user's `state_dict()` and hooks may leave out entries, so they must see the partitioned ones too.
        with access.allowed():
            return super().lightning_module_state_dict()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Save a folder, to which every rank writes the parts that it has.

        The folder is written next to the old one, and replaces it when all ranks are done: see
        :mod:`lightning_zeroplus.checkpoint.places.place`.

        Args:
            checkpoint: The Trainer's state.
            filepath: The folder, or an address such as ``s3://bucket/last.ckpt``; it is replaced if it exists.
            storage_options: Refused.

        Raises:
            TypeError: If ``storage_options`` is given.
            ValueError: If ``filepath`` is an address that fsspec does not know, or whose package is not installed.
            Exception: On every rank, if saving failed on one, or the save before with ``save_async``. The old
                checkpoint stays.
        """
        if storage_options is not None:
            raise TypeError(
                f"`{type(self).__name__}` saves without a `CheckpointIO` and takes no `storage_options`: remove them."
            )
        from lightning_zeroplus.engine.state.parts import EngineState

        place = self._place(filepath)
        self._wait_for_save()
        state = EngineState(self.model)
        with_optimizer = "optimizer_states" in checkpoint  # not with `save_weights_only`
        chosen = everywhere(lambda: self._chosen(checkpoint, state))
        # A hook may have changed the state dict on one rank only. Rank 0 counts: it writes what is not sharded.
        kept = self.broadcast(chosen.kept)
        tied = state.tied()
        frozen = {name: each for name, each in self._left_out().items() if tied.get(name, name) in kept}
        kept = kept - frozen.keys()
        parts = (part for part in state.parts(with_optimizer) if part.state is not None or part.name in kept)
        rest = self._rest(checkpoint, state, chosen._replace(kept=kept))
        rest["zeroplus"] |= _without(frozen)
        self._save_folder(place, fragments_to_save(parts, state), rest)

    def _chosen(self, checkpoint: Mapping[str, Any], state: EngineState) -> Chosen:
        """The entries of ``checkpoint["state_dict"]`` that are saved; tied parameters under their first name."""
        if "current_model_state" in checkpoint or "state_dict" not in checkpoint:
            return Chosen(frozenset(state.shapes), state.extra())
        return chosen_of(checkpoint["state_dict"], state)

    @staticmethod
    def _rest(checkpoint: Mapping[str, Any], state: EngineState, chosen: Chosen) -> dict[str, Any]:
        """What is not sharded."""
        summary = summary_of(state, "optimizer_states" in checkpoint, chosen.kept)
        everything = chosen.kept == state.shapes.keys() and chosen.extra.keys() == state.extra().keys()
        ours = {"format": FORMAT if everything else HOOKED, "engine": summary, "extra": chosen.extra}
        # A callback that averages weights has put them into `state_dict`, and needs the module's own weights too.
        averaged = "current_model_state" in checkpoint
        left_out = {"optimizer_states"} if averaged else {"optimizer_states", "state_dict"}
        return {key: value for key, value in checkpoint.items() if key not in left_out} | {"zeroplus": ours}

    # -- loading ----------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint of any stage and number of ranks; ``setup()`` loads weights and optimizer states.

        Args:
            checkpoint_path: A folder that this strategy has saved; a file of another strategy that saves whole tensors,
                such as DDP; or a safetensors file with weights, for example from :func:`lightning_zeroplus.export`.
                It may be at an address, such as ``s3://bucket/last.ckpt``.
            weights_only: False unpickles whatever the checkpoint contains, and so may execute code from it. Otherwise
                it may contain tensors, plain data, and what ``torch.serialization.add_safe_globals`` allows.

        Returns:
            The state for the Trainer and its callbacks.

        Raises:
            FileNotFoundError: If ``checkpoint_path`` does not exist.
            RuntimeError: On every rank, if it is damaged or does not fit; the model is unchanged.
        """
        from lightning_zeroplus.engine.engine import ZeroPlusEngine

        path = self._readable(checkpoint_path)
        source = everywhere(lambda: open_checkpoint(path, weights_only is not False))
        if isinstance(self.model, ZeroPlusEngine):
            self._restore(source)
        else:
            self._pending = source
            if isinstance(source, FolderSource) and not source.has_averaged_weights:
                self._placeholders = source.placeholders()
                source.rest["state_dict"] = self._placeholders.state_dict
        return source.rest

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Record what hooks have made of the state dict; :meth:`setup` loads the weights."""
        from lightning_zeroplus.weights.partitioned import access

        source, placeholders, self._placeholders = self._pending, self._placeholders, None
        module = self.lightning_module
        assert module is not None
        state = checkpoint.get("state_dict", {})
        self._is_strict = strict
        if changes_what_it_loads(module):
            state, self._is_strict = everywhere(lambda: what_it_loads(module, state, strict))
        with access.allowed():
            names = saved_names(module)
        own = {saved: name for name, saved in names.items()}  # as torch's own hooks would rename them
        state = {own.get(name, name): value for name, value in state.items()} if own else state
        if isinstance(source, FileSource):
            source.rest["state_dict"] = state
        if placeholders is not None:
            assert isinstance(source, FolderSource)
            hooked = everywhere(
                lambda: HookedSource(source, placeholders, state, names) if placeholders.changed(state) else None
            )
            self._pending = hooked or source

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: :meth:`setup` loads the optimizer state."""

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        """False: the strategy restores the optimizer."""
        return False

    def _restore(self, source: Source) -> None:
        """Read the parts that this rank needs, and load them when every rank has read its own."""
        from lightning_zeroplus.engine.state.parts import EngineState

        state = EngineState(self.model)
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if isinstance(source, FolderSource) and not fitting and source.has_averaged_weights:
            source = _Averaged(source)
        self._check_left_out(source.path, source.frozen, source.shapes().keys())
        strict = self.lightning_module.strict_loading and self._is_strict
        extra = everywhere(lambda: checked_extra(source, state, strict))
        summary = everywhere(lambda: self._summary(source, state)) if fitting else {"optimizer": None}
        frozen = frozen_with_states(summary["optimizer"], state)
        if frozen:
            cast("ZeroPlusEngine", self.model).keep_states_of(frozen)
            state = EngineState(self.model)
        staged = everywhere(lambda: staged_from(source, source, state, summary))
        with loading_as_it_is(self.lightning_module):  # they have had their turn
            state.load(staged, summary, extra)
        metrics_to(self.lightning_module, self.root_device)

    def _summary(self, source: Source, state: EngineState) -> dict[str, Any]:
        """What is loaded besides tensors."""
        trained = {name for group in state.group_names() for name in group}
        summary = source.summary(self._parameter_groups, trained)
        if summary["optimizer"] is None and isinstance(source, (FolderSource, HookedSource)):
            raise RuntimeError(
                f"The checkpoint {str(source.path)!r} was saved with `save_weights_only=True` and cannot be resumed. To"
                " start from its weights, write them to a file with `lightning_zeroplus.export`, and pass that file."
            )
        return summary


class _Averaged(FileSource):
    """The averaged weights in a folder, which are loaded unless the model is trained."""

    def __init__(self, folder: FolderSource) -> None:
        self.path = folder.path
        self.rest = folder.rest


def _without(frozen: Mapping[str, Fingerprint]) -> dict[str, Any]:
    return {"format": WITHOUT_FROZEN, "frozen": plain(frozen)} if frozen else {}
