"""What is raised where a weight is not there."""

from __future__ import annotations


class PartitionedWeightError(RuntimeError):
    """A weight was read or written on a rank that has only a part of it (ZeRO stage 3), and it cannot be gathered now.

    That is so within an optimizer's step, in compiled graphs, without an optimizer, and for another dtype. The message
    names the parameter. ``zp.gathered(...)`` gives the whole weight, to read and to write; ``zp.ema_update(...)``
    updates a teacher without gathering anything.
    """
