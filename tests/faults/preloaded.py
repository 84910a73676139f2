"""What the fork server imports, once for all jobs."""

from __future__ import annotations

import os

# Before DeepSpeed settles for an accelerator, and before torch makes threads, which a fork would lose.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"

import torch._dynamo
import torch.distributed.checkpoint
from deepspeed.comm.torch import build_shm_op

import tests.faults.job  # noqa: F401

torch.set_num_threads(1)
build_shm_op()
