"""Saves that leave the old checkpoint or the new one, even after a kill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.fabric.utilities.types import _PATH

from lightning_zeroplus.checkpoint import atomic
from lightning_zeroplus.checkpoint.everywhere import everywhere


class SavesAtomically:
    """Mixin for a strategy of the Trainer. See :mod:`lightning_zeroplus.checkpoint.atomic`."""

    is_global_zero: bool

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
