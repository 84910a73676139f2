"""Checkpoints of ZeroPlusFSDPStrategy: atomic, and without code from the file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_zeroplus.checkpoint.data_only import load_data, read_metadata
from lightning_zeroplus.checkpoint.everywhere import errors_of_torch, everywhere
from lightning_zeroplus.checkpoint.hooked import (
    Loaded,
    changes_what_it_loads,
    earlier_names,
    loading_as_it_is,
    what_it_loads,
)
from lightning_zeroplus.checkpoint.places.address import Address, Files
from lightning_zeroplus.checkpoint.places.files import writer_to
from lightning_zeroplus.checkpoint.places.place import Place
from lightning_zeroplus.checkpoint.saving.background import on_host
from lightning_zeroplus.checkpoint.saving.frozen import FROZEN, plain
from lightning_zeroplus.checkpoint.saving.trainer_state import save_trainer_state, serialized
from lightning_zeroplus.checkpoint.sources import OTHERS, TRAINER, FileSource, open_file
from lightning_zeroplus.fsdp.state.checkpoint import (
    Staged,
    check_full_weights,
    load_full_states,
    load_full_weights,
    load_staged,
    name_full_states,
    named_by_torch,
    others_of,
    read_distributed,
    read_optimizers,
    read_whole_weights,
    without_departed,
    without_first_step,
)
from lightning_zeroplus.fsdp.whole.layout import as_stored
from lightning_zeroplus.fsdp.whole.tensor import view_as_whole
from lightning_zeroplus.strategy.common.saves import SavesAtomically

if TYPE_CHECKING:
    import lightning.pytorch as pl


#: What Lightning's ``WeightAveraging`` calls its own state, and the weights that are not averaged.
_AVERAGING, _NOT_AVERAGED = "averaging_state", "current_model_state"


class CheckpointingFSDPStrategy(SavesAtomically, ModelParallelStrategy):
    """Lightning's FSDP2 strategy, whose checkpoints are replaced atomically and cannot execute code."""

    _pending: tuple[Files, bool] | None = None
    _is_set_up = False
    _edited: Loaded | None = None
    _offered: Mapping[str, Any] = {}  # what hooks got
    _frozen_elsewhere: Mapping[str, Any] = {}
    _others: Mapping[str, Mapping[str, Any]] = {}  # by where the checkpoint has them
    _not_averaged: Mapping[str, Any] | None = None

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """False: hooks and callbacks see a checkpoint at the same time as under DDP; ``setup()`` loads the weights.

        With True the Trainer would not pass ``weights_only`` on.
        """
        return False

    @override
    def connect(self, model: pl.LightningModule) -> None:
        self._pending, self._is_set_up = None, False
        super().connect(model)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Save a folder or a file. It is written next to the old one, and replaces it when all ranks are done.

        See :mod:`lightning_zeroplus.checkpoint.places.place`.

        Args:
            checkpoint: The Trainer's state.
            filepath: The folder or file, or an address such as ``s3://bucket/last.ckpt``; it is replaced if it exists.
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
        place = self._place(filepath)
        self._wait_for_save()
        self._leave_out_frozen(checkpoint)
        if self._save_distributed_checkpoint:
            self._write(self._of_parts(place, checkpoint))
        else:
            with self._replacing(place):
                everywhere(lambda: self._put(place, checkpoint) if self.is_global_zero else None)

    @staticmethod
    def _put(place: Place, checkpoint: Mapping[str, Any]) -> None:
        with as_stored():
            place.put(serialized(checkpoint))

    def _of_parts(self, place: Place, checkpoint: dict[str, Any]) -> Callable[[Any], None]:
        """Take a checkpoint apart, in host memory if it is written in the background, and return what writes it."""
        optimizers = enumerate(checkpoint.pop("optimizer_states", ()))
        sections = [key for key in ("state_dict", _NOT_AVERAGED) if key in checkpoint]
        state = {key: self._with_buffers_of_rank_0(checkpoint.pop(key)) for key in sections}
        assert self.lightning_module is not None
        others = {key: others_of(self.lightning_module, weights) for key, weights in state.items()}
        for key, own in others.items():
            state[key] = {name: each for name, each in state[key].items() if name not in own}
        if any(others.values()):
            checkpoint[OTHERS] = others
        state |= {f"optimizer_{i}": each for i, each in optimizers}
        if self._saves_in_background:
            state = on_host(state)
        rest: dict[str, Any] | bytes = checkpoint
        if self._saves_in_background:
            rest = everywhere(lambda: serialized(checkpoint) if self.is_global_zero else b"")

        def write(group: Any) -> None:
            error: Exception | None = None
            with self._replacing(place, group) as staging:
                try:
                    with as_stored(), errors_of_torch(f"The checkpoint {str(place)!r} could not be saved"):
                        distributed_checkpoint.save(state, storage_writer=writer_to(staging), process_group=group)
                except Exception as problem:
                    error = problem
                everywhere(lambda: self._finish(place, rest, error), group)

        return write

    def _with_buffers_of_rank_0(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Leave what is whole to rank 0: ranks may have other buffers, of which torch saves those of any rank."""
        whole = {name for name, each in weights.items() if not isinstance(each, DTensor)}
        saved_by_rank_0 = self.broadcast(whole)
        return {name: each for name, each in weights.items() if self.is_global_zero or name not in saved_by_rank_0}

    def _leave_out_frozen(self, checkpoint: dict[str, Any]) -> None:
        params, weights, frozen = self._parameters_by_name(), checkpoint["state_dict"], self._left_out()
        # Not what a hook has put there. All ranks leave out the same.
        own = {name for name in frozen.keys() & weights.keys() if _is_same(weights[name], params[name])}
        if frozen and (own := self.broadcast(own)):
            frozen = {name: each for name, each in frozen.items() if name in own}
            checkpoint["state_dict"] = {name: each for name, each in weights.items() if name not in frozen}
            checkpoint[FROZEN] = plain(frozen)

    @override
    def _parameters_by_name(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return dict(named_by_torch(self.lightning_module))

    def _finish(self, place: Place, rest: dict[str, Any] | bytes, error: Exception | None) -> None:
        if error is not None:
            raise error
        if self.is_global_zero:
            save_trainer_state(place.staging, rest)
            place.commit()

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint; ``setup()`` loads weights and optimizer states.

        Args:
            checkpoint_path: A folder or a file that this strategy has saved; a file of another strategy that saves
                whole tensors, such as DDP; or a safetensors file with weights. Also at an address.
            weights_only: False unpickles whatever the checkpoint contains, and so may execute code from it. Otherwise
                it may contain tensors, plain data, and what ``torch.serialization.add_safe_globals`` allows.

        Returns:
            The state for the Trainer and its callbacks.

        Raises:
            FileNotFoundError: If ``checkpoint_path`` does not exist.
            ValueError: If it is the address of a folder, and ``weights_only=False``.
            RuntimeError: On every rank, if it is damaged or contains more than data; the model is unchanged.
        """
        path = self._readable(checkpoint_path)
        rest = everywhere(lambda: _open(path, weights_only is not False))
        self._pending = path, weights_only is not False
        self._edited = None
        self._frozen_elsewhere, self._others = rest.pop(FROZEN, {}), rest.pop(OTHERS, {})
        if self._edits_weights and "state_dict" not in rest:
            rest["state_dict"] = {**self._whole_weights(path, weights_only is not False), **self._of_others()}
        self._offered = dict(rest.get("state_dict", {})) if self._edits_weights else {}
        self._not_averaged = self._offer_averages(path, rest)
        if self._is_set_up:
            self.restore_pending()
        return rest

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """As Lightning's. For a single file, ``on_save_checkpoint`` gets whole tensors on every rank, as under DDP."""
        module = self.lightning_module
        assert module is not None
        with as_stored():
            if not self._save_distributed_checkpoint and is_overridden("on_save_checkpoint", module):
                options = StateDictOptions(full_state_dict=True)
                weights = get_model_state_dict(module, options=options)
            else:
                weights = super().lightning_module_state_dict()
        return {name: view_as_whole(weight, shared=True) for name, weight in weights.items()}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "optimizer", optimizer)  # in Lightning's wrapper
        if isinstance(optimizer, LBFGS):
            raise MisconfigurationException(
                "`LBFGS` has one state for all parameters together, and sharded checkpoints hold one state per"
                " parameter. Save weights only, `ModelCheckpoint(save_weights_only=True)`, or use"
                " `strategy='zeroplus_stage0'`."
            )
        has_stepped = bool(optimizer.state)
        module = self.lightning_module
        assert module is not None
        with as_stored(), without_departed(optimizer, module), without_first_step(optimizer):
            state = super().optimizer_state(optimizer)
        return state if has_stepped or not state else {**state, "state": {}}

    def _offer_averages(self, path: Files, rest: dict[str, Any]) -> Mapping[str, Any] | None:
        """Give a ``WeightAveraging`` what it reads, and return the weights that it lets the module load.

        The checkpoint's own weights are the averages, which other Trainers and ``zp.export`` use.
        """
        module = self.lightning_module
        assert module is not None
        callbacks: Any = module.trainer.callbacks  # type: ignore[attr-defined]
        averages = [each for each in callbacks if isinstance(each, WeightAveraging) and each._average_model is not None]
        if not averages or _AVERAGING not in rest:
            return None
        if path.is_dir():
            rest["state_dict"], rest[_NOT_AVERAGED] = (
                {**read_whole_weights(path, f"{key}."), **self._of_others(key)} for key in ("state_dict", _NOT_AVERAGED)
            )
        weights: Mapping[str, Any] = rest[_NOT_AVERAGED]
        return weights

    def _of_others(self, key: str = "state_dict") -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._others.get(key, {})
        return found

    @property
    def _edits_weights(self) -> bool:
        module = self.lightning_module
        return module is not None and (is_overridden("on_load_checkpoint", module) or changes_what_it_loads(module))

    def _whole_weights(self, path: Files, weights_only: bool) -> Mapping[str, Any]:
        if path.is_file():
            return FileSource(path, weights_only).weights
        return read_whole_weights(path)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Keep the weights that hooks have changed, until the module is sharded."""
        if self._edits_weights:
            module = self.lightning_module
            assert module is not None
            self._edited = everywhere(lambda: what_it_loads(module, checkpoint["state_dict"], strict))

    def restore_pending(self) -> None:
        """Load the checkpoint that :meth:`load_checkpoint` has opened, into the module, which is sharded now."""
        if not self._is_set_up:
            self._note_frozen()
        self._is_set_up = True
        if self._pending is None:
            return
        (path, weights_only), self._pending = self._pending, None
        module = self.lightning_module
        assert module is not None
        strict = module.strict_loading
        if self._not_averaged is not None:
            self._edited, self._not_averaged = Loaded(self._not_averaged, strict=True), None
        given = () if self._edited is None else self._edited.state.keys()
        self._check_left_out(path, self._frozen_elsewhere, given)
        without = self._frozen_elsewhere.keys() - given
        if self._edited is not None:
            with loading_as_it_is(module):
                self._restore_edited(path, weights_only, self._edited.state, strict and self._edited.strict, without)
            self._offered = {}
        elif path.suffix == ".safetensors":
            load_full_weights(path, FileSource(path).weights, module, strict)
        elif path.is_dir():
            others = self._of_others()
            staged = read_distributed(path, module, self.optimizers, strict, without, weights_only, others)
            load_staged(staged, module, self.optimizers, strict and not without)
        else:
            source = FileSource(path, weights_only)
            check_full_weights(path, source.weights, module, strict)
            states = self._full_states(source)
            load_full_weights(path, source.weights, module, strict)
            load_full_states(states, module, self.optimizers)

    def _full_states(self, source: FileSource) -> list[dict[str, Any]]:
        module = self.lightning_module
        assert module is not None
        saved = source.rest.get("optimizer_states", ())
        return everywhere(lambda: name_full_states(source.path, saved, module, self.optimizers))

    def _restore_edited(
        self, path: Files, weights_only: bool, weights: Mapping[str, Any], strict: bool, without: Collection[str]
    ) -> None:
        module = self.lightning_module
        assert module is not None
        self._edited = None
        check_full_weights(path, weights, module, strict, without)
        if path.is_dir():
            earlier = earlier_names(self._offered, weights)
            states = read_optimizers(path, module, self.optimizers, earlier, weights_only)
            load_staged(Staged({}, states), module, self.optimizers, strict=False)
        elif path.suffix != ".safetensors" and self.optimizers:
            load_full_states(self._full_states(FileSource(path, weights_only)), module, self.optimizers)
        load_full_weights(path, weights, module, strict, without)


def _is_same(value: Any, param: Tensor) -> bool:
    """Whether an entry of a ``state_dict`` is the parameter itself."""
    with as_stored():
        first, second = (each._local_tensor if isinstance(each, DTensor) else each for each in (value, param))
        return isinstance(first, Tensor) and first.shape == second.shape and first.data_ptr() == second.data_ptr()


def _open(path: Files, weights_only: bool) -> dict[str, Any]:
    if not path.is_dir():
        return open_file(path, weights_only).rest
    if not weights_only and isinstance(path, Address):
        raise ValueError(
            f"`weights_only=False` for the checkpoint of several files {str(path)!r}: `zeroplus_fsdp` reads code from a"
            " local folder only. Copy that folder, and give its path."
        )
    rest: dict[str, Any] = load_data(path / TRAINER, weights_only)
    if not isinstance(rest, dict) or "zeroplus" in rest:
        raise RuntimeError(
            f"The checkpoint {str(path)!r} was saved by `ZeroPlusStrategy`. Write it to a file with"
            " `lightning_zeroplus.export(..., 'model.ckpt', optimizer=True)`, and pass that file."
        )
    if weights_only:
        read_metadata(path)
    return rest
