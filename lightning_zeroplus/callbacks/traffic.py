"""Counting the collectives that reduce gradients, per optimizer step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_zeroplus.gradients.ranks import gloo

# The reducing methods of DeepSpeed's communication backend, with the position and the name of the argument to reduce.
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
        step: The number of optimizer steps before this one.
        collectives: Number of calls of gradient-reducing collectives.
        bytes: Their payload in bytes: elements times element size of the tensors to reduce, in the dtype that is
            communicated, with the padding of stage 3. At stage 0 it includes one number per parameter, which tells the
            ranks whether the parameter has a gradient. The traffic depends on the algorithm: in a ring of n ranks,
            each rank sends 2 (n - 1) / n times the payload for an all-reduce, and half of that for a reduce-scatter. An
            all-to-all that makes a reduce-scatter on gloo also sends half, and counts as one collective.
        seconds: Time in the collectives and in the ``wait()`` of asynchronous ones, in seconds, including the wait for
            slower ranks. For CUDA tensors, the time on the stream that issued them.
        held_bytes: The peak of unreduced gradients in bytes, over all reductions and the ends of all backwards.
    """

    step: int
    collectives: int
    bytes: int
    seconds: float
    held_bytes: int


class ReductionTraffic:
    """Counts the gradient reductions that one engine issues through ``deepspeed.comm``.

    Between :meth:`install` and :meth:`uninstall`, or inside a ``with``, the reducing methods of DeepSpeed's
    communication backend (of that one object, not of its class) are wrapped, and so is our own reduction on gloo.
    :meth:`drain_finished_steps` returns the counts.

    A gradient reduction is a reducing collective of floating-point numbers. The optimizer's own update also reduces
    (gradient norm, overflow): collectives while ``engine.updating`` is set are not counted. Collectives that bypass
    ``deepspeed.comm``, such as the collectives of logged metrics, are not counted either. All-reduces are not counted
    under ``stage3_use_all_reduce_for_fetch_params``, because they fetch parameters there.

    CUDA tensors are timed by events on the current stream, because a host clock would measure launches only. A step is
    returned once the device has passed its events.

    Args:
        engine: The engine. ``engine.updating`` and ``engine.gradient_accumulation.held_bytes()`` are read.
        current_step: Returns the number of optimizer steps so far. A change ends a step.
    """

    def __init__(self, engine: Any, current_step: Callable[[], int]) -> None:
        self._engine = engine
        self._current_step = current_step
        self._held: Callable[[], int] = engine.gradient_accumulation.held_bytes
        self._wrapped: list[tuple[Any, str]] = []
        # Finished steps, with the events whose time is not added yet.
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
            ValueError: If another ``ReductionTraffic`` is installed.
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
        for name, argument in reductions.items():
            self._wrap(comm.cdb, name, *argument)
        self._wrap(gloo.reduction, "reduce_parts", 0, "flat")
        self._wrap(gloo.reduction, "add_parts", 0, "parts")

    def _wrap(self, owner: Any, name: str, position: int, keyword: str) -> None:
        # An attribute of the instance hides the method of its class.
        setattr(owner, name, self._counted(getattr(owner, name), position, keyword))
        self._wrapped.append((owner, name))

    def uninstall(self) -> None:
        """Stop counting and restore the backend. Finished steps can still be drained."""
        for owner, name in self._wrapped:
            delattr(owner, name)
        self._wrapped.clear()

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, *exception: object) -> None:
        self.uninstall()

    def _counted(self, collective: Callable[..., Any], position: int, keyword: str) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            payload = kwargs[keyword] if keyword in kwargs else args[position]
            tensors = [payload] if isinstance(payload, Tensor) else payload
            # Integers are control messages, such as whether the ranks agree or one has overflowed.
            if not tensors[0].is_floating_point() or self._engine.updating:
                return collective(*args, **kwargs)
            self.observe()
            self._collectives += 1
            self._bytes += sum(tensor.nbytes for tensor in tensors)
            on_device = tensors[0].is_cuda
            work = self._timed(on_device, collective, *args, **kwargs)
            return work if work is None or isinstance(work, Tensor) else _TimedWork(work, self, on_device)

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
        """Close the step if a new one has begun, and update the peak of held gradients."""
        step = self._current_step()
        if step != self._step:
            self._close()
            # Steps in between, without a gradient and thus never observed.
            self._closed.extend((StepTraffic(empty, 0, 0, 0.0, 0), []) for empty in range(self._step + 1, step))
            self._open(step)
        self._held_bytes = max(self._held_bytes, self._held())

    def _close(self) -> None:
        traffic = StepTraffic(self._step, self._collectives, self._bytes, self._seconds, self._held_bytes)
        self._closed.append((traffic, self._spans))

    def drain_finished_steps(self, wait: bool = False) -> list[StepTraffic]:
        """Return the finished steps that were not returned before, in order.

        Args:
            wait: Wait for the device and return all of them. False: steps from the first one with unfinished
                collectives on are returned by a later call.
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
    """The handle of an asynchronous collective; adds the time of ``wait()`` to the traffic."""

    def __init__(self, work: Any, traffic: ReductionTraffic, on_device: bool) -> None:
        self._work = work
        self._traffic = traffic
        self._on_device = on_device

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        return self._traffic._timed(self._on_device, self._work.wait, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
