"""Saves that leave the old checkpoint or the new one, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.fabric.utilities.types import _PATH

from lightning_zeroplus.checkpoint import atomic
from lightning_zeroplus.checkpoint.everywhere import everywhere


class SavesAtomically:
    """Mixin for a strategy of the Trainer's: see :mod:`lightning_zeroplus.checkpoint.atomic`."""

    is_global_zero: bool

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[Path]:
        """Around the writing of what will take the place of ``path``; on all ranks together.

        Yields:
            Where to write it. After an exception it is removed, and what was there before stays.
        """
        everywhere(lambda: atomic.prepare(path) if self.is_global_zero else None)
        try:
            yield atomic.staging(path)
        except Exception:
            if self.is_global_zero:
                atomic.discard(path)
            raise

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove a checkpoint; killed in between, it leaves the whole or no checkpoint."""
        if self.is_global_zero:
            atomic.remove(atomic.local_path(filepath))
