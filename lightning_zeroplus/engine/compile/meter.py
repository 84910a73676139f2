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
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def gathered(self, *buffers: Tensor) -> None:
        """An all-gather has filled ``buffers``."""
        self.gathers += 1
        for buffer in buffers:
            storage = buffer.untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage), buffer.nbytes
        self.peak = max(self.peak, self.live())

    def freed(self, buffer: Tensor) -> None:
        """The memory of ``buffer`` has been given back, although there may be views of it."""
        self._storages.pop(buffer.untyped_storage()._cdata, None)

    def live(self) -> int:
        """Bytes that are gathered now."""
        self._storages = {key: value for key, value in self._storages.items() if not value[0].expired()}
        return sum(nbytes for _, nbytes in self._storages.values())

    def reset_peak(self) -> None:
        """Count the peak anew from here."""
        self.peak = self.live()
