"""What the fork server imports, once for all jobs."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)

import torch._dynamo
import torch.distributed.checkpoint
from deepspeed.comm.torch import build_shm_op

import tests.faults.job  # noqa: F401

build_shm_op()
