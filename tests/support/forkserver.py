"""Processes that have imported everything when they start: the ranks of a pool, the jobs that meet a fault.

Importing torch, Lightning and DeepSpeed takes most of the time of a short job, and nearly all of the time that ranks
take to start again after one has failed.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def fork_server() -> ForkServerContext:
    """Starts processes as copies of one that has imported ``tests/support/preloaded.py``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    return context
