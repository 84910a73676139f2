"""What ``torch.cuda`` answers in a process with the simulated device.

A CPU build of torch has the Python side of ``torch.cuda`` and none of its C++ functions. Those are supplied here, and
the classes of streams and events, on top of torch's own for any accelerator. Nothing is imported from the package: this
file runs before it.
"""

from __future__ import annotations

import time
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

import torch

_MEMORY = 80 << 30  # bytes of each device, as an A100 or H100 has
_CAPABILITY = (9, 0)
_CUDA_VERSION = 12080

_native: ModuleType


class Stream(torch.Stream):
    """``torch.cuda.Stream`` of a simulated device."""

    def __new__(cls, device: Any = None, priority: int = 0, **identity: Any) -> Stream:
        if "stream_id" in identity:
            return super().__new__(cls, **identity)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    """``torch.cuda.Event`` of a simulated device. Its times are those of the host, on which kernels really run."""

    _timed: bool
    _recorded_at: float | None

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
    ) -> Event:
        if interprocess:
            raise NotImplementedError("The simulated CUDA device has no events between processes.")
        device = torch.device("cuda", _native.get_device())
        event: Event = super().__new__(cls, device=device, enable_timing=enable_timing, blocking=blocking)
        event._timed, event._recorded_at = enable_timing, None
        return event

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(current_stream() if stream is None else stream)
        self._recorded_at = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:  # type: ignore[override]
        """Milliseconds between two records. Raises as CUDA does, without timing or a record."""
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded_at is None or end_event._recorded_at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded_at - self._recorded_at) * 1000

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(current_stream() if stream is None else stream)


class _OnStream:
    """``torch.cuda.StreamContext``: a stream is current within, and its device."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is None:
            return
        self._device = _native.get_device()
        self._before = torch._C._accelerator_getStream(self._stream.device_index)
        set_stream(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            torch._C._accelerator_setStream(self._before)
            _native.set_device(self._device)


class _OnDevice:
    """``torch.cuda.device``: a device is current within. A negative index, or None, changes nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else torch.cuda._utils._get_device_index(device, optional=True)

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _native.set_device(self.prev_idx)


def _index(device: Any = None) -> int:
    """The number of a device given in any of torch's ways; the current one if it has no number."""
    if device is None:
        return int(_native.get_device())
    if isinstance(device, int):
        index = device
    else:
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")
        index = -1 if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise RuntimeError(f"CUDA error: invalid device ordinal (cuda:{index})")
    return index if index >= 0 else int(_native.get_device())


def current_stream(device: Any = None) -> Stream:
    stream = torch._C._accelerator_getStream(_index(device))
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def default_stream(device: Any = None) -> Stream:
    kind = torch._C._accelerator_getStream(_index(device)).device_type
    return Stream(stream_id=0, device_index=_index(device), device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    _native.set_device(stream.device_index)
    torch._C._accelerator_setStream(stream)


def _exchange_device(index: int) -> int:
    before = int(_native.get_device())
    if index >= 0:
        _native.set_device(index)
    return before


def _synchronize(device: Any = None) -> None:
    _native.synchronize(_index(device))


def _properties(device: Any = None) -> SimpleNamespace:
    _index(device)  # raises if there is no such device
    return SimpleNamespace(
        name="simulated CUDA device",
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_MEMORY,
        multi_processor_count=132,
        warp_size=32,
        L2_cache_size=50 << 20,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
        uuid="simulated",
    )


def _memory_stats(device: Any = None) -> dict[str, int]:
    """All keys of the real function. There is one pool, the host's, so nothing is reserved or split."""
    in_bytes, in_blocks = _native.usage(_index(device))
    nothing = (0, 0, 0)
    sizes = dict.fromkeys(("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"), in_bytes)
    counts = dict.fromkeys(("allocation", "segment", "active"), in_blocks)
    rest = dict.fromkeys(("inactive_split", "inactive_split_bytes"), nothing)
    stats = {"num_alloc_retries": 0, "num_ooms": 0}
    for pool in ("all", "large_pool", "small_pool"):
        for name, values in (sizes | counts | rest).items():
            now, peak, total = nothing if pool == "small_pool" else values
            of_pool = {"current": now, "peak": peak, "allocated": total, "freed": total - now}
            stats |= {f"{name}.{pool}.{key}": value for key, value in of_pool.items()}
    for name in ("oversize_allocations", "oversize_segments"):
        stats |= {f"{name}.{key}": 0 for key in ("current", "peak", "allocated", "freed")}
    return stats


def install(native: ModuleType, devices: int) -> None:
    """Let ``torch.cuda`` answer for the simulated devices. Nothing is restored: the process is for this.

    Args:
        native: The extension module.
        devices: The number of devices.
    """
    global _native
    _native = native
    _install_c_functions(devices)
    _install_devices(devices)
    _install_streams()
    _install_memory()


def _install_c_functions(devices: int) -> None:
    functions: dict[str, Any] = {
        "_cuda_getDeviceCount": lambda: devices,
        "_cuda_getDevice": _native.get_device,
        "_cuda_setDevice": _native.set_device,
        "_cuda_exchangeDevice": _exchange_device,
        "_cuda_maybeExchangeDevice": _exchange_device,
        "_cuda_synchronize": _synchronize,
        "_cuda_init": lambda: None,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getCompiledVersion": lambda: _CUDA_VERSION,
        "_cuda_getArchFlags": lambda: f"sm_{_CAPABILITY[0]}{_CAPABILITY[1]}",
        "_cuda_emptyCache": lambda: None,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_hasPrimaryContext": lambda index: True,
        "_cuda_getCurrentRawStream": lambda index: current_stream(index).stream_id,
    }
    for name, function in functions.items():
        setattr(torch._C, name, function)


def _install_devices(devices: int) -> None:
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda._is_compiled = lambda: True
    cuda.init = cuda._lazy_init = lambda: None
    cuda.is_initialized = lambda: True
    cuda._initialized = True
    cuda.device_count = lambda: devices
    cuda.current_device = _native.get_device
    cuda.set_device = lambda device: _native.set_device(_index(device))
    cuda.device = _OnDevice
    cuda.default_generators = tuple(_native.default_generator(index) for index in range(devices))
    cuda.get_device_properties = _properties
    cuda.get_device_name = lambda device=None: _properties(device).name
    cuda.get_device_capability = lambda device=None: _CAPABILITY
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.can_device_access_peer = lambda device, peer: True
    cuda.ipc_collect = lambda: None
    cuda.synchronize = _synchronize
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *_: 0)
    torch.backends.cuda.is_built = lambda: True


def _install_streams() -> None:
    cuda: Any = torch.cuda
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.stream = cuda.StreamContext = _OnStream
    cuda.current_stream = current_stream
    cuda.default_stream = default_stream
    cuda.set_stream = set_stream
    cuda.is_current_stream_capturing = cuda.graphs.is_current_stream_capturing = lambda: False


def _install_memory() -> None:
    def reset_peak(device: Any = None) -> None:
        _native.reset_peak(_index(device))

    def allocated(device: Any = None) -> int:
        return int(_native.usage(_index(device))[0][0])

    def peak(device: Any = None) -> int:
        return int(_native.usage(_index(device))[0][1])

    functions: dict[str, Any] = dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), allocated)
    functions |= dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), peak)
    resets = ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")
    functions |= dict.fromkeys(resets, reset_peak)
    functions["memory_stats"] = _memory_stats
    functions["mem_get_info"] = lambda device=None: (_MEMORY - allocated(device), _MEMORY)
    functions["empty_cache"] = lambda: None
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
        setattr(torch.cuda.memory, name, function)
    _install_storages()


def _install_storages() -> None:
    """Storages of the device: a CPU build of torch can neither make nor resize them."""
    storage: Any = torch.UntypedStorage
    make, resize = storage.__new__, storage.resize_

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *args, **kwargs) if device is None else make(cls, *args, device=device, **kwargs)
        size = args[0] if args else kwargs.get("size", 0)
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        _native.resize_storage(self, size)
        return self

    storage.__new__ = new
    storage.resize_ = resize_
