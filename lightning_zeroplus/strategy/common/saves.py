"""Saves that leave the old checkpoint or the new one, even after a kill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.types import _PATH

from lightning_zeroplus.checkpoint import atomic
from lightning_zeroplus.checkpoint.data_only import load_data
from lightning_zeroplus.checkpoint.everywhere import everywhere
from lightning_zeroplus.checkpoint.fragments import Fragment, save_fragments
from lightning_zeroplus.checkpoint.sources import TRAINER, save_trainer_state


class SavesAtomically:
    """Mixin for a strategy of the Trainer or of Fabric. See :mod:`lightning_zeroplus.checkpoint.atomic`."""

    is_global_zero: bool
    _has_warned = False

    def _write(self, path: Path, fragments: Iterable[Fragment], rest: Mapping[str, Any]) -> None:
        """Replace the folder ``path``. All ranks call it together.

        Args:
            path: The folder.
            fragments: What this rank keeps of the sharded tensors.
            rest: What is not sharded; rank 0 writes it.

        Raises:
            Exception: On every rank, if saving failed on one. The old checkpoint stays.
        """
        with self._replacing(path) as staging:
            save_fragments(staging, fragments)
            everywhere(lambda: self._commit(path, rest) if self.is_global_zero else None)

    def _commit(self, path: Path, rest: Mapping[str, Any]) -> None:
        save_trainer_state(atomic.staging(path), rest)
        if not self._has_warned:
            self._has_warned = True
            _warn_of_code(atomic.staging(path) / TRAINER)
        atomic.commit(path)

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[Path]:
        """Prepare to replace ``path``. All ranks enter together, write within, and commit themselves.

        Yields:
            Where to write. An exception removes what was written there, and ``path`` keeps its content.
        """
        everywhere(lambda: atomic.prepare(path) if self.is_global_zero else None)
        try:
            yield atomic.staging(path)
        except Exception:
            if self.is_global_zero:
                atomic.discard(path)
            raise

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove a checkpoint. A kill leaves the whole checkpoint or none."""
        if self.is_global_zero:
            atomic.remove(atomic.local_path(filepath))


def _warn_of_code(file: Path) -> None:
    try:
        load_data(file)
    except RuntimeError as error:
        rank_zero_warn(f"Loading will refuse the checkpoint that is being saved, unless you allow it: {error}")
