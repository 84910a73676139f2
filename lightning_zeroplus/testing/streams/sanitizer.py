"""A happens-before race detector for code that uses streams, on CPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from unittest import mock

from deepspeed.accelerator import real_accelerator
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from typing_extensions import Self

from lightning_zeroplus.testing.streams.accelerator import SimulatedAccelerator
from lightning_zeroplus.testing.streams.autograd import FunctionMode, SimulatedEngine, custom_node_maker
from lightning_zeroplus.testing.streams.clocks import Device, Kernel, Stream, join, running_node
from lightning_zeroplus.testing.streams.collectives import Communication
from lightning_zeroplus.testing.streams.dispatch import HOST_READS, Accesses, AccessMode, is_collective
from lightning_zeroplus.testing.streams.ipg import bucket_name
from lightning_zeroplus.testing.streams.locations import calling_location
from lightning_zeroplus.testing.streams.report import Race, Site, StreamRaceError, report
from lightning_zeroplus.testing.streams.shadow import Conflict, Memory, Shadow, spans
from lightning_zeroplus.testing.streams.timeline import draw, schedule, write_trace

_INSTALLED = threading.Lock()


class StreamSanitizer:
    """Finds stream races in the code that runs within it, without a GPU.

    Within the context DeepSpeed's accelerator has simulated streams. Every operator, also of backwards, counts as a
    kernel on the stream that would be current on a GPU. Two kernels race if they touch the same bytes, one of them
    writes, and no wait orders them. The result does not depend on timing: a race is found although the kernels ran one
    after the other.

    To test your own gradient hooks: take streams and events from ``deepspeed.accelerator.get_accelerator()`` or from
    :meth:`stream` instead of ``torch.cuda``, train two steps of a small model within the context, and :meth:`check`::

        def test_hook_waits_for_the_gradient():
            with StreamSanitizer() as sanitizer:
                side = sanitizer.stream("side")
                total = torch.zeros(8)
                sanitizer.name(total, "the sum of gradients")
                weight = torch.ones(8, requires_grad=True)

                def add(param):
                    side.wait_stream(get_accelerator().current_stream())  # without this line, check() raises
                    with get_accelerator().stream(side):
                        total.add_(param.grad)

                weight.register_post_accumulate_grad_hook(add)
                (weight * 2).sum().backward()
            sanitizer.check()

    To check that a test would notice a forgotten wait, run it once for each of :attr:`sites`, with ``drop`` set to it.

    Within the context cyclic garbage is not collected: finalizers would synchronize, or free memory, at random times.

    It does not see reads that bypass the dispatcher (``data_ptr()``), copies between host and device (all memory is the
    device's), and the writes of custom kernels whose schema does not declare them.

    Args:
        lifetime: Also report memory that may be given to another tensor while a stream still uses it, because nobody
            called ``record_stream`` or waited. Memory that was allocated before the context is not checked for this.
        drop: One of :attr:`sites`: a synchronization that shall have no effect.

    Raises:
        ValueError: If an argument has the wrong type.
        RuntimeError: On entering, if another sanitizer is active in this process.

    Attributes:
        device: The simulated streams, and everything that was launched on them.
    """

    def __init__(self, *, lifetime: bool = False, drop: str | None = None) -> None:
        if not isinstance(lifetime, bool):
            raise ValueError(f"`lifetime` must be True or False, not {lifetime!r}.")
        if drop is not None and not isinstance(drop, str):
            raise ValueError(f"`drop` must be one of `StreamSanitizer.sites`, or None, not {drop!r}.")
        self.device = Device(drop)
        self._memory = Memory(lifetime)
        self._names: dict[Shadow, str] = {}
        self._races: dict[tuple[str, str, Site, Site], Race] = {}
        self._communication = Communication(self.device)
        self._mode = FunctionMode(self.device, lambda name, tensor: self._accessed(name, Accesses([tensor], [], [])))
        self._engine = SimulatedEngine(Variable._execution_engine, self.device, self._mode, self._record)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if not _INSTALLED.acquire(blocking=False):
            raise RuntimeError("Another StreamSanitizer is active in this process. Leave it first.")
        with ExitStack() as stack:
            stack.callback(_INSTALLED.release)
            if gc.isenabled():  # the finalizer of an older engine synchronizes the device, which would hide races
                stack.callback(gc.enable)
                gc.disable()
            accelerator = SimulatedAccelerator(self.device)
            stack.enter_context(mock.patch.object(real_accelerator, "ds_accelerator", accelerator))
            stack.enter_context(mock.patch.object(Variable, "_execution_engine", self._engine))
            stack.enter_context(mock.patch.object(BackwardCFunction, "__init__", custom_node_maker(self.device)))
            stack.enter_context(mock.patch.object(Tensor, "record_stream", _recording(self)))
            for owner, name, replacement in self._communication.patches():
                stack.enter_context(mock.patch.object(owner, name, replacement))
            stack.enter_context(AccessMode(self._accessed))
            stack.enter_context(self._mode)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def stream(self, name: str) -> Stream:
        """A new stream, with the methods of ``torch.cuda.Stream``."""
        return Stream(self.device, name)

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Make ``stream`` current, as ``torch.cuda.stream`` does."""
        return self.device.on(stream)

    def name(self, tensor: Tensor, name: str) -> None:
        """Name the tensor's memory in reports. DeepSpeed's gradient buckets have names already."""
        self._names[self._memory.of(tensor)] = name

    def clear(self) -> None:
        """Forget the races, kernels and sites so far, for example after a warm-up. The host waits for every stream."""
        for stream in self.device.streams:
            join(self.device.host, stream.clock)
        self.device.kernels.clear()
        self.device.sites.clear()
        self._races.clear()

    @property
    def races(self) -> list[Race]:
        """The races found so far."""
        return list(self._races.values())

    @property
    def sites(self) -> dict[str, int]:
        """Every synchronization call (``"wait_stream at file:line function"``), and how often it ran."""
        return dict(self.device.sites)

    def report(self) -> str:
        """The races found so far, as text."""
        return report(self.races, len(self.device.kernels))

    def check(self) -> None:
        """Raise if there are races.

        Raises:
            StreamRaceError: With the report.
        """
        if self._races:
            raise StreamRaceError(self.report())

    def timeline(
        self,
        durations: Callable[[Kernel], float],
        trace: str | Path | None = None,
        picture: str | Path | None = None,
    ) -> float:
        """Schedule all launched kernels. Each starts as soon as the kernels that it waits for are finished.

        Args:
            durations: Returns the seconds that a kernel takes. Launching it takes the host no time.
            trace: Where to write the schedule for ``chrome://tracing`` (JSON).
            picture: Where to draw the schedule (PNG); needs matplotlib.

        Returns:
            The time when the last kernel is finished, in seconds.
        """
        scheduled = schedule(self.device.kernels, durations)
        if trace is not None:
            write_trace(scheduled, Path(trace))
        if picture is not None:
            draw(scheduled, Path(picture))
        return max((each.end for each in scheduled), default=0.0)

    def _accessed(self, name: str, touched: Accesses) -> None:
        if self._communication.waiting:
            return
        if name == "_c10d_functional::wait_tensor":
            self._communication.finish_functional()
            return
        node = running_node()
        label = name if node is None else f"{name} in {node.name()}"
        location = calling_location()
        if is_collective(name):
            stream = self._communication.begin()
        else:
            stream = self._engine.stream_of_sum(name) or self.device.current
        for tensor in touched.fresh:
            self._memory.allocate(tensor, stream, f"the output of {label} at {location}")
        if not touched.reads and not touched.writes:
            return
        tensors = [*touched.reads, *touched.writes]
        kernel = self.device.launch(label, location, sum(tensor.nbytes for tensor in tensors), stream)
        for write, accessed in ((False, touched.reads), (True, touched.writes)):
            for tensor in accessed:
                self._access(tensor, kernel, write)
        if is_collective(name):
            for tensor in tensors:
                self._record(tensor, stream)  # the work handle keeps them alive
        if name in HOST_READS:
            join(self.device.host, stream.clock)

    def _access(self, tensor: Tensor, kernel: Kernel, write: bool) -> None:
        shadow = self._memory.of(tensor)
        for span in spans(tensor):
            for conflict in shadow.access(span, kernel, write):
                self._found(tensor, shadow, conflict)

    def _found(self, tensor: Tensor, shadow: Shadow, conflict: Conflict) -> None:
        buffer = self._names.get(shadow) or bucket_name(tensor) or shadow.allocated_by
        first, second = Site.of(conflict.first), Site.of(conflict.second)
        key = (conflict.kind, buffer, first, second)
        known = self._races.get(key)
        if known is None:
            known = Race(conflict.kind, buffer, conflict.span, first, second, times=0)
        self._races[key] = known._replace(times=known.times + 1)

    def _record(self, tensor: Tensor, stream: Stream) -> None:
        self._memory.of(tensor).recorded.add(stream)


def _recording(sanitizer: StreamSanitizer) -> Callable[[Tensor, Stream], None]:
    def record_stream(tensor: Tensor, stream: Stream) -> None:
        if sanitizer.device.happens("record_stream"):
            sanitizer._record(tensor, stream)

    return record_stream
