"""What upstream writes for its developers, and a training need not pay for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from deepspeed.accelerator import get_accelerator

from lightning_zeroplus.gradients.patches.replacement import Replacement

_on_cpu = get_accelerator().device_name() == "cpu"
_replacement = (
    Replacement(type(get_accelerator()), "memory_stats", lambda self, device_index=None: {}) if _on_cpu else None
)


class SparesReports:
    """Overrides on upstream's optimizers of stages 1 to 3."""

    def report_ipg_memory_usage(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: upstream makes a line of text for each gradient, and then does not print it."""


@contextmanager
def without_statistics() -> Iterator[None]:
    """Within a step: upstream asks for an allocator's statistics, which on the CPU are the size of the process."""
    with _replacement() if _replacement is not None else nullcontext():
        yield
