"""What the fork server of the tests imports, once for all ranks and jobs."""

from __future__ import annotations

import gc
import importlib
import os

# Before DeepSpeed settles for an accelerator, and before torch makes threads, which a fork would lose.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"

import deepspeed.module_inject.auto_ep_layer  # noqa: F401
import torch._dynamo.testing
import torch._inductor.compile_fx
import torch.distributed.checkpoint

import lightning_zeroplus.engine.build  # noqa: F401
import tests.faults.job
import tests.programs.cell  # noqa: F401
from tests.programs.program import programs

torch.set_num_threads(1)
programs()
# Tests that call DeepSpeed itself need no operator for inference either: it takes a minute to compile.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
# DeepSpeed collects garbage whenever it partitions a model: half a second, for what these modules consist of.
gc.collect()
gc.freeze()
