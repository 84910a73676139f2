"""What the fork server of the tests imports, once for all ranks and jobs."""

from __future__ import annotations

import gc
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
# DeepSpeed collects garbage whenever it partitions a model: half a second, for what these modules consist of.
gc.collect()
gc.freeze()
