"""The process around DeepSpeed: no noise in its logs, time limits for all its groups, and a clean exit."""

from __future__ import annotations

import logging
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from lightning.fabric.utilities.distributed import _destroy_dist_connection
from torch.distributed import distributed_c10d

log = logging.getLogger(__name__)

_TIMED_OUT = re.compile("(gloo|NCCL).*(timed out|timeout)", re.IGNORECASE | re.DOTALL)


def leave_process_group() -> None:
    """Destroy the process group at exit, and let gloo's threads drop their last tensors.

    CPython ends a thread that asks for the GIL while the interpreter is finalizing. C++ answers with
    ``std::terminate``: the finished job exits with status 134. DeepSpeed's module globals keep the groups alive, so
    destroying them does not join the threads. Releasing the GIL for a moment lets them finish.
    """
    _destroy_dist_connection()
    time.sleep(0.05)


@contextmanager
def time_limit_of_new_groups(timeout: timedelta | None) -> Iterator[None]:
    """Set the time limit of collectives of every process group that is made within to ``timeout``; None: leave it.

    DeepSpeed reduces in a copy of the world group, and FSDP2 in groups of a mesh. Both would have torch's default of 10
    or 30 minutes, whatever the limit of the world group.
    """
    before = set(distributed_c10d._world.pg_map)
    yield
    if timeout is None:
        return
    for group in set(distributed_c10d._world.pg_map) - before:
        if group.size() > 1 and group.rank() >= 0:
            distributed_c10d._set_pg_timeout(timeout, group)


def name_time_limit(error: BaseException, timeout: timedelta | None) -> None:
    """If a collective timed out, log which argument sets the limit."""
    if isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)):
        log.error(
            f"The ranks wait for each other at most {timeout}, the strategy's `timeout`: another rank has ended, is"
            " stopped, is out of reach, or does other work. If it is only slow, set a longer `timeout`."
        )


def quiet_deepspeed() -> None:
    from deepspeed.utils import logger

    if logger.level < logging.WARNING:
        logger.setLevel(logging.WARNING)
    # torch 2.13 warns at every collective that DeepSpeed calls by an old name. A user cannot change that.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", FutureWarning
    )
