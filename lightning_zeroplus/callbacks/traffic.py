"""Counting the collectives that reduce gradients, per optimizer step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

# The methods of DeepSpeed's communication backend that reduce: where among their arguments, and under which name, is
# what they reduce.
_REDUCTIONS: dict[str, tuple[int, str]] = {
    "all_reduce": (0, "tensor"),
    "all_reduce_coalesced": (0, "tensors"),
    "reduce": (0, "tensor"),
    "reduce_scatter": (1, "input_list"),
    "reduce_scatter_tensor": (1, "input_tensor"),
}


class StepTraffic(NamedTuple):
    """The gradient reductions of one optimizer step, as one rank sees them.

    Attributes:
        step: Optimizer steps taken before this one: the first is 0.
        collectives: Calls of gradient-reduction collectives.
        bytes: Payload handed to them, in bytes: elements times element size of the tensors to reduce, in the dtype that
            is communicated and with the padding of stage 3; at stage 0, one more number per parameter tells which of
            them have a gradient. What an algorithm then sends is another matter: in a ring of n ranks, an all-reduce
            sends 2 (n - 1) / n times as much from each rank, a reduce-scatter half of that.
        seconds: Time in the collectives and in the ``wait()`` of asynchronous ones, in seconds; waiting for a slower
            rank included. For CUDA tensors, what the stream that issued them spent.
        held_bytes: The most bytes of unreduced gradients held at any reduction and at the end of any backward.
    """

    step: int
    collectives: int
    bytes: int
    seconds: float
    held_bytes: int


class ReductionTraffic:
    """Counts the gradient reductions that one engine issues through ``deepspeed.comm``.

    Between :meth:`install` and :meth:`uninstall`, or inside a ``with``, the reducing methods of DeepSpeed's
    communication backend (of that one object, not of its class) are wrapped; :meth:`take` gives what was counted.

    A gradient reduction is a reducing collective of floating-point numbers outside of the optimizer's own update,
    whose reductions (gradient norm, overflow) ``engine.updating`` tells apart. Collectives that do not go through
    ``deepspeed.comm``, such as those of logged metrics, never come here. All-reduces are not counted with
    ``stage3_use_all_reduce_for_fetch_params``, under which they fetch parameters.

    For CUDA tensors, where a host clock would measure launches, timing events on the current stream are used; a step
    is given out once the device has passed them. This path has not been run on a GPU.

    Args:
        engine: The engine. ``engine.updating`` and ``engine.gradient_accumulation.held_bytes()`` are read.
        current_step: Gives the number of optimizer steps taken so far; a change ends a step.
    """

    def __init__(self, engine: Any, current_step: Callable[[], int]) -> None:
        self._engine = engine
        self._current_step = current_step
        self._held: Callable[[], int] = engine.gradient_accumulation.held_bytes
        self._backend: Any = None
        self._wrapped: list[str] = []
        # Steps that are over, with the events whose time is still to be added.
        self._closed: deque[tuple[StepTraffic, list[_DeviceSpan]]] = deque()
        self._open(0)

    def _open(self, step: int) -> None:
        self._step = step
        self._collectives = self._bytes = self._held_bytes = 0
        self._seconds = 0.0
        self._spans: list[_DeviceSpan] = []

    def install(self) -> None:
        """Start counting, in the current step.

        Raises:
            ValueError: If a traffic is installed already.
        """
        # Not at the top: importing DeepSpeed fixes its accelerator, and the Trainer has not picked one yet.
        from deepspeed.comm import comm

        reductions = dict(_REDUCTIONS)
        config = self._engine._config.zero_config
        if config.use_all_reduce_for_fetch_params:
            del reductions["all_reduce"]
        if any(name in vars(comm.cdb) for name in reductions):
            raise ValueError("Gradient reductions are being counted already: use one `ReductionMonitor` per Trainer.")
        self._open(self._current_step())
        self._backend = comm.cdb
        for name, (position, keyword) in reductions.items():
            # An attribute of the instance hides the method of its class.
            setattr(self._backend, name, self._counted(getattr(self._backend, name), position, keyword))
            self._wrapped.append(name)

    def uninstall(self) -> None:
        """Stop counting and leave the backend as it was. What was counted can still be taken."""
        for name in self._wrapped:
            delattr(self._backend, name)
        self._wrapped.clear()
        self._backend = None

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, *exception: object) -> None:
        self.uninstall()

    def _counted(self, collective: Callable[..., Any], position: int, keyword: str) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            payload = kwargs[keyword] if keyword in kwargs else args[position]
            tensors = [payload] if isinstance(payload, Tensor) else payload
            # Integers are control messages: do the ranks agree, has one overflowed.
            if not tensors[0].is_floating_point() or self._engine.updating:
                return collective(*args, **kwargs)
            self.observe()
            self._collectives += 1
            self._bytes += sum(tensor.nbytes for tensor in tensors)
            on_device = tensors[0].is_cuda
            work = self._timed(on_device, collective, *args, **kwargs)
            return work if work is None else _TimedWork(work, self, on_device)

        return counted

    def _timed(self, on_device: bool, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if on_device:
            span = _DeviceSpan(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            span.start.record()
            result = call(*args, **kwargs)
            span.end.record()
            self._spans.append(span)
            return result
        start = time.perf_counter()
        result = call(*args, **kwargs)
        self._seconds += time.perf_counter() - start
        return result

    def observe(self) -> None:
        """Look at the current step, which may be a new one, and at the gradients held now."""
        step = self._current_step()
        if step != self._step:
            self._close()
            # Steps that nothing came between, because they had no gradient.
            self._closed.extend((StepTraffic(empty, 0, 0, 0.0, 0), []) for empty in range(self._step + 1, step))
            self._open(step)
        self._held_bytes = max(self._held_bytes, self._held())

    def _close(self) -> None:
        traffic = StepTraffic(self._step, self._collectives, self._bytes, self._seconds, self._held_bytes)
        self._closed.append((traffic, self._spans))

    def drain_finished_steps(self, wait: bool = False) -> list[StepTraffic]:
        """Give out the steps that are over and have not been given out, in order.

        Args:
            wait: Wait for the device, so that all of them are; else those with unfinished collectives stay for later.
        """
        taken = []
        while self._closed:
            traffic, spans = self._closed[0]
            if not wait and not all(span.end.query() for span in spans):
                break
            self._closed.popleft()
            seconds = traffic.seconds + sum(span.seconds() for span in spans)
            taken.append(traffic._replace(seconds=seconds))
        return taken


class _DeviceSpan(NamedTuple):
    """Two events on one CUDA stream."""

    start: torch.cuda.Event
    end: torch.cuda.Event

    def seconds(self) -> float:
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1e3


class _TimedWork:
    """The handle of an asynchronous collective; what ``wait()`` takes is added to the traffic."""

    def __init__(self, work: Any, traffic: ReductionTraffic, on_device: bool) -> None:
        self._work = work
        self._traffic = traffic
        self._on_device = on_device

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        return self._traffic._timed(self._on_device, self._work.wait, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
