"""A clipping of gradients. Without DeepSpeed, because the audit of other strategies needs it too."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Clip(NamedTuple):
    """What is clipped: the averaged, unscaled gradient of one step.

    Attributes:
        limit: The largest global L2 norm, or the largest absolute value of one element.
        algorithm: ``"norm"`` or ``"value"``.
    """

    limit: float
    algorithm: Literal["norm", "value"]
