"""Upstream lets the host wait for the device, where it is enough that one stream waits for another."""

from __future__ import annotations

from typing import Any

from deepspeed.accelerator import get_accelerator

from lightning_zeroplus.engine.reduction.streams import PARTITION, streams_matter
from lightning_zeroplus.gradients.patches.replacement import Replacement


class WaitsOnDevice:
    """Stands in for a stream that upstream lets the host wait for: the current stream waits for it instead.

    Args:
        stream: The stream.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def synchronize(self) -> None:
        """Let what is launched from now on come after what the stream has been given."""
        get_accelerator().current_stream().wait_stream(self._stream)


class SparesHostWaits:
    """Overrides on ``DeepSpeedZeroOptimizer_Stage3``; each calls ``super()``.

    Under offload upstream decides: the host reads gradients and writes weights, and has to wait.
    """

    def independent_gradient_partition_epilogue(self: Any) -> None:
        """Reduce what is left in buckets; the current stream waits for that, and the step does.

        Upstream lets the host wait in every backward, also if nothing is reduced.
        """
        if not streams_matter() or self.offload_optimizer:
            super().independent_gradient_partition_epilogue()  # type: ignore[misc]
            return
        self.gradient_accumulation.reduce_buckets()  # on upstream's stream; what is left to do there is nothing
        stream = self.reduce_and_partition_stream
        with get_accelerator().stream(stream):
            self.gradient_accumulation.local_sums.writers.record(PARTITION)
        self.reduce_and_partition_stream = WaitsOnDevice(stream)
        try:
            super().independent_gradient_partition_epilogue()  # type: ignore[misc]
        finally:
            self.reduce_and_partition_stream = stream

    def _post_step(self: Any, *args: Any) -> None:
        """Gather the weights that stay gathered; the current stream waits for the collective.

        Upstream waits for the collective in the same way, and then lets the host wait for the device.
        """
        if not streams_matter() or self.offload_optimizer:
            super()._post_step(*args)  # type: ignore[misc]
            return
        with Replacement(get_accelerator(), "synchronize", lambda *_: None)():
            super()._post_step(*args)  # type: ignore[misc]
