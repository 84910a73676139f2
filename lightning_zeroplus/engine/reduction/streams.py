"""Order between accelerator streams that write gradients and streams that read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

#: The key of this rank's partition of the reduced gradients; other keys are indices of parameters.
PARTITION = -1


def streams_matter() -> bool:
    """Whether work on one stream may overtake work on another: not on the CPU."""
    return not get_accelerator().resolves_data_dependency()


class Writers:
    """The streams that wrote to some tensors: whoever reads or adds waits for them.

    At the end of a backward, autograd makes the stream of its caller wait for the streams that the backward used. It
    orders nothing for another stream, or for a hook in the middle of a backward.
    """

    def __init__(self) -> None:
        self._stream_of: dict[int, Any] = {}
        self._events: dict[Any, Any] = {}  # one for each stream or PARTITION, recorded again and again

    def wait(self, key: int) -> None:
        """Let the current stream wait for whoever wrote the tensor ``key`` last."""
        stream, current = self._stream_of.get(key), get_accelerator().current_stream()
        if stream is None or stream == current:
            return
        if key == PARTITION:  # what its writer was given since then may be the rest of a backward
            current.wait_event(self._events[PARTITION])
        else:
            current.wait_event(self._recorded(stream, stream))

    def use(self, tensor: Tensor) -> None:
        """Note that the current stream uses ``tensor``: another stream may have allocated it, and it may be freed."""
        tensor.record_stream(get_accelerator().current_stream())

    def record(self, key: int) -> None:
        """Note that the current stream has written the tensor ``key``."""
        stream = self._stream_of[key] = get_accelerator().current_stream()
        if key == PARTITION:
            self._recorded(PARTITION, stream)

    def wait_for_all(self, tensors: Iterable[Tensor] = ()) -> None:
        """Let the current stream wait for everything written; it will read ``tensors``, which may be freed early."""
        current = get_accelerator().current_stream()
        for stream in set(self._stream_of.values()) - {current}:
            current.wait_event(self._recorded(stream, stream))
        for tensor in tensors:
            tensor.record_stream(current)

    def _recorded(self, key: Any, stream: Any) -> Any:
        event = self._events.get(key)
        if event is None:
            event = self._events[key] = get_accelerator().Event()
        event.record(stream)
        return event

    def clear(self) -> None:
        """Forget all writers."""
        self._stream_of.clear()


def refuse_graph_capture() -> None:
    """Refuse to reduce gradients within a CUDA graph.

    Raises:
        RuntimeError: If the current stream is being captured: a replay would run no Python code.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "A backward under ZeRO cannot be captured in a CUDA graph: a replay would not run the reduction of its"
            " gradients. Capture the forward only."
        )
