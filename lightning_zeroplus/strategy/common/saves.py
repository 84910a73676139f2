"""Saves that leave the old checkpoint or the new one, even after a kill."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_zeroplus.checkpoint.data_only import load_data
from lightning_zeroplus.checkpoint.everywhere import everywhere
from lightning_zeroplus.checkpoint.fragments import Fragment, save_fragments
from lightning_zeroplus.checkpoint.places.address import Address, Files
from lightning_zeroplus.checkpoint.places.place import Place, place_of
from lightning_zeroplus.checkpoint.saving.background import BackgroundSaves, on_host
from lightning_zeroplus.checkpoint.saving.frozen import Fingerprint, FrozenWeights, check_frozen
from lightning_zeroplus.checkpoint.saving.trainer_state import save_trainer_state, serialized
from lightning_zeroplus.checkpoint.sources import TRAINER
from lightning_zeroplus.strategy.common.arguments import check_bool

if TYPE_CHECKING:
    import lightning.pytorch as pl


class SavesAtomically:
    """Mixin for a strategy of the Trainer or of Fabric. See :mod:`lightning_zeroplus.checkpoint.places.place`.

    Attributes:
        opened: The folder or the file of the checkpoint that was opened last.
    """

    opened: Files | None = None

    is_global_zero: bool
    root_device: torch.device
    lightning_module: pl.LightningModule | None
    #: Lightning's FSDP2 strategy may write one file instead, by its plugin.
    _save_distributed_checkpoint = True
    _save_frozen = True
    _frozen: FrozenWeights | None = None
    _save_async = False
    _is_training = False
    _background: BackgroundSaves | None = None
    _has_failed: bool
    _timeout: timedelta | None
    _has_warned = False

    def _set_saves(self, save_frozen: bool, save_async: bool) -> None:
        check_bool("save_frozen", save_frozen)
        check_bool("save_async", save_async)
        self._save_frozen, self._save_async = save_frozen, save_async

    def _check_io(self) -> None:
        """Take Lightning's ``AsyncCheckpointIO`` for ``save_async=True``. Refuse others: they would not be asked."""
        io: Any = self._checkpoint_io  # type: ignore[attr-defined]
        if isinstance(io, AsyncCheckpointIO):
            self._save_async, io = True, io._checkpoint_io
        if io is not None and type(io) is not TorchCheckpointIO:
            raise MisconfigurationException(
                f"The plugin `{type(io).__name__}` would not be used: a checkpoint is a folder that the ranks write"
                " together. Remove it. Addresses such as `s3://bucket/name` need none; `zp.export` writes one file."
            )

    def _place(self, path: _PATH) -> Place:
        """Where a checkpoint lies, as rank 0 says; all ranks call it.

        Raises:
            ValueError: On every rank, if one cannot use the address.
        """
        path, unique = self.broadcast((path, uuid.uuid4().hex))  # type: ignore[attr-defined]
        return everywhere(lambda: place_of(path, unique))

    def _readable(self, path: _PATH) -> Files:
        """The files of a checkpoint that is about to be loaded; all ranks call it.

        Raises:
            ValueError, RuntimeError: On every rank, if one cannot use the address.
        """
        place = self._place(path)
        found = everywhere(place.readable)
        # Another job may save there at this moment: all ranks read what rank 0 has found.
        self.opened = self.broadcast(found) if isinstance(found, Address) else found  # type: ignore[attr-defined]
        return self.opened

    def _save_folder(self, place: Place, fragments: Iterable[Fragment], rest: Any) -> None:
        """Replace a checkpoint, now or in the background. All ranks call it, after :meth:`_wait_for_save`.

        Args:
            place: The checkpoint.
            fragments: What this rank keeps of the sharded tensors.
            rest: What is not sharded, by name; rank 0 writes it.

        Raises:
            Exception: On every rank, if saving failed on one. The old checkpoint stays.
        """
        if self._saves_in_background:
            fragments = [each._replace(data=on_host(each.data)) for each in fragments]
            rest = everywhere(lambda: serialized(rest) if self.is_global_zero else b"")

        def write(group: Any) -> None:
            with self._replacing(place, group) as staging:
                save_fragments(staging, fragments, group)
                everywhere(lambda: self._commit(place, rest) if self.is_global_zero else None, group)

        self._write(write)

    def _commit(self, place: Place, rest: Mapping[str, Any] | bytes) -> None:
        save_trainer_state(place.staging, rest)
        if not self._has_warned:
            self._has_warned = True
            _warn_of_code(place.staging / TRAINER)
        place.commit()

    @contextmanager
    def _replacing(self, place: Place, group: Any = None) -> Iterator[Files]:
        """Prepare to replace a checkpoint. All ranks enter together, write within, and commit themselves.

        Args:
            place: The checkpoint.
            group: The process group of all ranks; None: the default group.

        Yields:
            Where to write. An exception removes what was written there, and the old checkpoint stays.
        """
        everywhere(lambda: place.prepare() if self.is_global_zero else None, group)
        try:
            yield place.staging
        except Exception:
            if self.is_global_zero:
                place.discard()
            raise

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove a checkpoint. A kill leaves the whole checkpoint or none.

        While another one is being written, it is removed when that one is complete, and stays if that fails.
        """
        if not self.is_global_zero:
            return
        place = place_of(filepath)
        if self._background is None:
            place.remove()
        else:
            self._background.afterwards(place.remove)

    # -- in the background ------------------------------------------------------------------------------------------

    @property
    def _saves_in_background(self) -> bool:
        """Whether a save may go on after it returns: the training goes on, too, and waits for it at its end."""
        if not self._save_async or not self._is_training or self.lightning_module is None:
            return False
        return self.lightning_module.trainer.state.status == TrainerStatus.RUNNING

    def _write(self, write: Callable[[Any], None]) -> None:
        """Call ``write`` with a process group, now or in the background, after :meth:`_wait_for_save`."""
        if self._saves_in_background:
            self._background = self._background or BackgroundSaves(self._timeout)
            self._background.start(write)
        else:
            write(None)

    def _wait_for_save(self) -> None:
        """Wait until a save in the background is complete.

        Raises:
            Exception: On all ranks, if it has failed on one.
        """
        if self._background is not None:
            self._background.wait()

    def on_train_start(self) -> None:
        super().on_train_start()  # type: ignore[misc]
        self._is_training = True

    def on_train_end(self) -> None:
        self._is_training = False
        super().on_train_end()  # type: ignore[misc]
        self._wait_for_save()

    def teardown(self) -> None:
        """End. After an exception, perhaps on this rank only, a save that is being written goes on by itself."""
        background, self._is_training = self._background, False
        try:
            if background is not None and not self._has_failed:
                self._background = None
                background.wait()
                background.close()
        finally:
            super().teardown()  # type: ignore[misc]

    # -- without frozen weights -------------------------------------------------------------------------------------

    def _check_saves(self, trainer: pl.Trainer) -> None:
        if self._save_distributed_checkpoint:
            self._check_io()
        if not self._save_frozen and any(isinstance(each, WeightAveraging) for each in trainer.callbacks):  # type: ignore[attr-defined]
            raise MisconfigurationException(
                "`save_frozen=False` with `WeightAveraging`: its checkpoints hold the average of every weight, frozen"
                " ones too. Use `zp.EMA`, or `save_frozen=True`."
            )

    def _note_frozen(self) -> None:
        """Remember the frozen weights, before any checkpoint is loaded; a collective."""
        self._frozen = None if self._save_frozen else FrozenWeights(self._parameters_by_name, self.root_device)

    def _left_out(self) -> dict[str, Fingerprint]:
        """What a checkpoint leaves out now; a collective, unless everything is saved."""
        return {} if self._frozen is None else self._frozen.left_out()

    def _check_left_out(self, path: Files, stored: Mapping[str, Any], given: Collection[str] = ()) -> None:
        if stored:
            check_frozen(str(path), stored, given, self._parameters_by_name(), self.root_device)

    def _parameters_by_name(self) -> dict[str, Any]:
        """A tied parameter under each of its names."""
        assert self.lightning_module is not None
        return dict(self.lightning_module.named_parameters(remove_duplicate=False))


def _warn_of_code(file: Files) -> None:
    try:
        load_data(file)
    except RuntimeError as error:
        rank_zero_warn(f"Loading will refuse the checkpoint that is being saved, unless you allow it: {error}")
