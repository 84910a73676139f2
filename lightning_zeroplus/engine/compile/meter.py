"""How many bytes of gathered parameters there are, and how many there were at most."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class GatherMeter:
    """Counts the storages that hold gathered parameters, for as long as anybody holds them.

    Attributes:
        peak: The most bytes at a time, seen when something was gathered.
        gathers: How many all-gathers there were.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.gathers = 0
        self._storages: list[StorageWeakRef] = []
        self._bytes: list[int] = []

    def gathered(self, *buffers: Tensor) -> None:
        """An all-gather has filled ``buffers``."""
        self.gathers += 1
        for buffer in buffers:
            self._storages.append(StorageWeakRef(buffer.untyped_storage()))
            self._bytes.append(buffer.nbytes)
        self.peak = max(self.peak, self.live())

    def live(self) -> int:
        """Bytes that are gathered now."""
        alive = [(ref, size) for ref, size in zip(self._storages, self._bytes, strict=True) if not ref.expired()]
        self._storages, self._bytes = [ref for ref, _ in alive], [size for _, size in alive]
        return sum(self._bytes)

    def reset_peak(self) -> None:
        """Count the peak anew from here."""
        self.peak = self.live()
