"""The current and the peak number of bytes of gathered parameters."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class GatherMeter:
    """Counts the storages that hold gathered parameters, for as long as they live.

    Attributes:
        peak: The most bytes at a time, measured after each all-gather.
        gathers: The number of all-gathers.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.gathers = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def gathered(self, *buffers: Tensor) -> None:
        """Note that an all-gather has filled ``buffers``."""
        self.gathers += 1
        for buffer in buffers:
            storage = buffer.untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage), buffer.nbytes
        self.peak = max(self.peak, self.live())

    def freed(self, buffer: Tensor) -> None:
        """Note that the memory of ``buffer`` was released, although views of it may live."""
        self._storages.pop(buffer.untyped_storage()._cdata, None)

    def live(self) -> int:
        """The current number of gathered bytes."""
        self._storages = {key: value for key, value in self._storages.items() if not value[0].expired()}
        return sum(nbytes for _, nbytes in self._storages.values())

    def reset_peak(self) -> None:
        """Start a new peak from the current number of bytes."""
        self.peak = self.live()
