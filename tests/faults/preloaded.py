"""What the fork server imports, once for all jobs."""

from __future__ import annotations

import os

# Before DeepSpeed settles for an accelerator, and before torch makes threads, which a fork would lose.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"

import torch._dynamo  # noqa: E402
import torch.distributed.checkpoint  # noqa: E402
from deepspeed.comm.torch import build_shm_op  # noqa: E402

import tests.faults.job  # noqa: E402, F401

torch.set_num_threads(1)
build_shm_op()
