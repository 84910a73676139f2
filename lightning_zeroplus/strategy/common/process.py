"""What a process needs around DeepSpeed: quiet while it runs, time limits that hold, and a clean exit."""

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

    A thread that asks for the GIL while the interpreter is finalizing is ended by CPython, which C++ answers with
    ``std::terminate``: the finished job exits with status 134. The groups live on in DeepSpeed's module globals, so
    destroying them does not join the threads; giving up the GIL for a moment does let them finish.
    """
    _destroy_dist_connection()
    time.sleep(0.05)


@contextmanager
def time_limit_of_new_groups(timeout: timedelta | None) -> Iterator[None]:
    """Give the process groups that are made within ``timeout`` as their collectives' time limit.

    DeepSpeed reduces in a copy of the world group, and FSDP2 in groups of a mesh. Both are made with torch's default of
    10 or 30 minutes, whatever the limit of the world group.
    """
    before = set(distributed_c10d._world.pg_map)
    yield
    if timeout is None:
        return
    for group in set(distributed_c10d._world.pg_map) - before:
        if group.size() > 1 and group.rank() >= 0:
            distributed_c10d._set_pg_timeout(timeout, group)


def name_time_limit(error: BaseException, timeout: timedelta | None) -> None:
    """Say of a collective's error that is due to the time limit which argument has set that."""
    if isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)):
        log.error(
            f"The ranks wait for each other at most {timeout}, the strategy's `timeout`: another rank has ended, is"
            " stopped, is out of reach, or does other work. If it was only slow, set a longer one."
        )


def quiet_deepspeed() -> None:
    from deepspeed.utils import logger

    if logger.level < logging.WARNING:
        logger.setLevel(logging.WARNING)
    # torch 2.13 warns in every collective that DeepSpeed calls by an old name; a user can do nothing about it.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", FutureWarning
    )
