"""What a window reports. It does not import DeepSpeed, because FSDP2's windows report the same."""

from __future__ import annotations

from typing import NamedTuple


class WindowReport(NamedTuple):
    """What a window defers.

    Attributes:
        parameters: Number of parameters whose gradients wait for the end of the window.
        bytes: Size of these gradients in bytes; every rank keeps them whole until then.
        all_parameters: Number of all trainable parameters.
        all_bytes: Size of all gradients in bytes.
    """

    parameters: int
    bytes: int
    all_parameters: int
    all_bytes: int
