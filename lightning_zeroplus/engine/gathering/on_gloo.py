"""The gathers of stage 3 on gloo: broadcasts in place of its all-gather, which takes several times as long.

Upstream's buffers, handles and order stay as they are. Only the collective is another one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from deepspeed.runtime.zero import partition_parameters
from torch import Tensor
from torch import distributed as dist

from lightning_zeroplus.engine.upstream.probe import has
from lightning_zeroplus.gradients.patches.replacement import Replacement
from lightning_zeroplus.gradients.ranks import gloo

_FEATURE = "one function for all gathers of ZeRO 3"
_NAME = "_dist_allgather_fn"
_upstream: Any = getattr(partition_parameters, _NAME, None)


def _all_gather(input_tensor: Tensor, output_tensor: Tensor, group: Any = None) -> Any:
    if not gloo.suits(group, output_tensor.device):
        return _upstream(input_tensor, output_tensor, group)
    parts = output_tensor.view(-1).chunk(dist.get_world_size(group))
    own = parts[dist.get_rank(group)]
    if own.data_ptr() != input_tensor.data_ptr():
        own.copy_(input_tensor.view(-1))
    return gloo.Gather(parts, group)


_replacement = Replacement(partition_parameters, _NAME, _all_gather)


def faster_gathers() -> AbstractContextManager[None]:
    """Within, upstream's gathers of partitioned weights are faster on gloo."""
    return _replacement() if has(_FEATURE) else nullcontext()
