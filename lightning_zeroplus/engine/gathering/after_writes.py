"""Stage 3 gathers weights on a stream of its own, after whatever the current stream writes to them.

Upstream's stream waits for nobody. It relies on the host, which waits for the device in every step; what a user writes
outside of steps, it would miss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed.accelerator import get_accelerator

from lightning_zeroplus.engine.reduction.streams import streams_matter


class GathersAfterWrites:
    """Mixin for upstream's ``PartitionedParameterCoordinator``."""

    def _PartitionedParameterCoordinator__all_gather_params(self: Any, params: Iterable[Any], forward: bool) -> None:
        if streams_matter():
            self._PartitionedParameterCoordinator__allgather_stream.wait_stream(get_accelerator().current_stream())
        super()._PartitionedParameterCoordinator__all_gather_params(params, forward)  # type: ignore[misc]
