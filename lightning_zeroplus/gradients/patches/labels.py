"""FSDP2's labels for torch's profiler: some 20 us each, several times per backward, also while nobody profiles."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.profiler import record_function

from lightning_zeroplus.gradients.patches.replacement import Replacement

_NOTHING = nullcontext()


def _label(name: str, *args: Any) -> AbstractContextManager[Any]:
    return record_function(name, *args) if torch.autograd._profiler_enabled() else _NOTHING


#: In its context the labels cost nothing while nobody profiles.
labels_for_profilers = Replacement(_fsdp_param_group, "record_function", _label)
