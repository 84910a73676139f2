"""What is raised where a weight is not there."""

from __future__ import annotations


class PartitionedWeightError(RuntimeError):
    """A weight was read or written on a rank that has only a part of it (ZeRO stage 3).

    The message names the parameter. ``zp.gathered(...)`` gives the whole weight, to read and to write;
    ``zp.ema_update(...)`` updates a teacher without gathering anything.
    """
