"""A DeepSpeed accelerator whose streams are simulated, on CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from lightning_zeroplus.testing.streams import clocks


class SimulatedAccelerator(CPU_Accelerator):
    """The CPU, pretending to run asynchronously.

    Args:
        device: The simulated streams.
    """

    def __init__(self, device: clocks.Device) -> None:
        super().__init__()
        self._device = device

    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return True

    def resolves_data_dependency(self) -> bool:
        return False

    def handles_memory_backpressure(self) -> bool:
        return False

    @property
    def Stream(self) -> Any:
        return partial(clocks.Stream, self._device)

    @property
    def Event(self) -> Any:
        return partial(clocks.Event, self._device)

    def stream(self, stream: clocks.Stream | None) -> AbstractContextManager[None]:
        return self._device.on(stream)

    def current_stream(self, device_index: int | None = None) -> clocks.Stream:
        return self._device.current

    def default_stream(self, device_index: int | None = None) -> clocks.Stream:
        return self._device.default

    def synchronize(self, device_index: int | None = None) -> None:
        self._device.synchronize()

    def device_count(self) -> int:
        return 1

    def create_op_builder(self, op_name: str) -> Any:
        # Collectives through shared memory exist on CPU only, and would be compiled.
        return None if op_name == "ShareMemCommBuilder" else super().create_op_builder(op_name)
