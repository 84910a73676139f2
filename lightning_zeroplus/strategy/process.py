"""What a process needs around DeepSpeed: quiet while it runs, and a clean exit."""

from __future__ import annotations

import logging
import time
import warnings

from lightning.fabric.utilities.distributed import _destroy_dist_connection


def leave_process_group() -> None:
    """Destroy the process group at exit, and let gloo's threads drop their last tensors.

    A thread that asks for the GIL while the interpreter is finalizing is ended by CPython, which C++ answers with
    ``std::terminate``: the finished job exits with status 134. The groups live on in DeepSpeed's module globals, so
    destroying them does not join the threads; giving up the GIL for a moment does let them finish.
    """
    _destroy_dist_connection()
    time.sleep(0.05)


def quiet_deepspeed() -> None:
    from deepspeed.utils import logger

    if logger.level < logging.WARNING:
        logger.setLevel(logging.WARNING)
    # torch 2.13 warns in every collective that DeepSpeed calls by an old name; a user can do nothing about it.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", FutureWarning
    )
