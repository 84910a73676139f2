"""What a real GPU was given to do, with the methods of the simulated device's log that a cost is made of."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

_COLLECTIVE = "ncclDevKernel_"
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_OURS = "lightning_zeroplus profile"


class Wait(NamedTuple):
    """A call of CUDA with which the host waits for the device."""

    operation: str
    #: Where torch says that it waits; empty: it does not say.
    location: str


class Profile:
    """One stretch of a rank's work. Empty until the context that made it ends."""

    def __init__(self) -> None:
        self._launched: Counter[str] = Counter()
        self._called: Counter[str] = Counter()
        self._places: list[str] = []

    def kernels(self) -> Counter[str]:
        """How often each kernel, copy and fill was launched, without collectives."""
        return Counter({name: times for name, times in self._launched.items() if not name.startswith(_COLLECTIVE)})

    def collectives(self) -> Counter[str]:
        """How often each kernel of NCCL was launched."""
        return Counter({name: times for name, times in self._launched.items() if name.startswith(_COLLECTIVE)})

    def host_synchronizations(self) -> Counter[Wait]:
        """How often the host waited. CUDA counts; torch knows the place of some."""
        calls = [name for name in _WAITS for _ in range(self._called[name])]
        places = [*self._places, *[""] * len(calls)]
        return Counter(Wait(name, place) for name, place in zip(calls, places, strict=False))

    def events(self) -> int:
        """How often an event was recorded."""
        return self._called["cudaEventRecord"] + self._called["cudaEventRecordWithFlags"]


@contextmanager
def profile() -> Iterator[Profile]:
    """Profile all that this process gives its GPU to do."""
    found = Profile()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with torch.profiler.record_function(_OURS):
                    yield found
            finally:
                torch.cuda.set_sync_debug_mode(mode)
    found._places = [f"{each.filename}:{each.lineno}" for each in said if "synchronizing CUDA" in str(each.message)]
    events = list(profiler.events())
    (span,) = [each.time_range for each in events if each.name == _OURS and each.device_type == DeviceType.CPU]
    for event in events:
        if event.device_type == DeviceType.CUDA:
            if event.name != _OURS and not getattr(event, "is_user_annotation", False):
                found._launched[event.name] += 1
        elif event.name.startswith("cuda") and span.start <= event.time_range.start <= span.end:
            found._called[event.name] += 1
