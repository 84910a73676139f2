"""The error for a weight that is not available."""

from __future__ import annotations

import torch
from torch import nn


class PartitionedWeightError(RuntimeError):
    """A weight was accessed that this rank has only a part of (ZeRO stage 3), and that cannot be gathered now.

    A weight cannot be gathered within an optimizer's step, in compiled graphs, in traces, or without an optimizer. The
    error is also raised if a weight would get another dtype. The message names the parameter, except in a trace.
    ``zp.gathered(...)`` gives the whole weight, to read and to write; ``zp.ema_update(...)`` updates a teacher.
    """


def check_not_traced() -> None:
    """Refuse to gather within ``torch.jit.trace``: the trace itself would not gather.

    Raises:
        PartitionedWeightError: Within a trace.
    """
    if torch._C._get_tracing_state() is not None:
        raise PartitionedWeightError(
            "`torch.jit.trace` of a module whose weights are partitioned: the trace would have only this rank's part of"
            " them. Trace a whole copy (`copy.deepcopy(module)`), or the module itself after the fit."
        )


def converted_error(before: torch.dtype, now: torch.dtype) -> PartitionedWeightError:
    """The error for a sharded module that runs in another dtype than that of the beginning of the fit."""
    return PartitionedWeightError(
        f"Weights were converted from {before} to {now} during the fit, and are gathered now: that needs the dtype that"
        f" they had when it began. Convert them back first, run a copy in {now} (`copy.deepcopy(module)`), choose the"
        " dtype by `Trainer(precision=...)`, or convert the module before the fit."
    )


def check_not_scripted(module: nn.Module) -> None:
    """Refuse a module of ``torch.jit.script`` whose weights are about to be partitioned.

    Raises:
        ValueError: If there is one; nothing was changed.
    """
    for name, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            raise ValueError(
                f"The module {name!r} is compiled by `torch.jit.script`, which runs no hooks: its partitioned weights"
                " could not be gathered. Script the module after the fit, or use `strategy='zeroplus_stage2'`."
            )
