"""What is raised where a weight is not there."""

from __future__ import annotations

import torch


class PartitionedWeightError(RuntimeError):
    """A weight was read or written on a rank that has only a part of it (ZeRO stage 3), and it cannot be gathered now.

    That is so within an optimizer's step, in compiled graphs and in traces, without an optimizer, and for another
    dtype. The message names the parameter. ``zp.gathered(...)`` gives the whole weight, to read and to write;
    ``zp.ema_update(...)`` updates a teacher without gathering anything.
    """


def check_not_traced() -> None:
    """Refuse to gather within ``torch.jit.trace``: a trace would gather once, when it is made, and never again.

    Raises:
        PartitionedWeightError: In a trace.
    """
    if torch._C._get_tracing_state() is not None:
        raise PartitionedWeightError(
            "`torch.jit.trace` of a module whose weights are partitioned: the trace would have this rank's part of"
            " them. Trace a whole copy, which `copy.deepcopy(module)` gives; or the module itself after the fit."
        )
