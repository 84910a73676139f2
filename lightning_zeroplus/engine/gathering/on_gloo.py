"""The gathers of stage 3 on gloo: broadcasts in place of its all-gather, which takes several times as long.

Upstream's buffers and handles stay as they are. The collective is another one, and large weights are gathered where
they belong: upstream would gather several into one buffer and copy each of them out of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from deepspeed.runtime.zero import partition_parameters
from torch import Tensor
from torch import distributed as dist

from lightning_zeroplus.engine.gathering.resident import is_special
from lightning_zeroplus.engine.upstream.probe import has
from lightning_zeroplus.gradients.patches.replacement import Replacement
from lightning_zeroplus.gradients.ranks import gloo

#: Elements. To copy fewer takes less time than a collective of their own.
_LARGE = 2**18
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


def collectives(params: Iterable[Any], forward: bool) -> list[list[Any]]:
    """Which weights one collective gathers, in the order of their use; the same on all ranks.

    Args:
        params: Partitioned weights, in any order.
        forward: Whether a forward uses them, and not a backward.
    """
    listed = sorted(params, key=lambda param: param.ds_id)
    if not has(_FEATURE) or not any(map(_is_alone, listed)):
        return [listed]
    together: list[Any] = []
    alone: list[Any] = []
    for param in listed if forward else reversed(listed):
        (alone if _is_alone(param) else together).append(param)
    return [each for each in (together, *([param] for param in alone)) if each]


def _is_alone(param: Any) -> bool:
    return (
        param.ds_numel >= _LARGE
        and not is_special(param)
        and gloo.suits(param.ds_process_group, param.ds_tensor.device)
    )


def faster_gathers() -> AbstractContextManager[None]:
    """Within, upstream's gathers of partitioned weights are faster on gloo."""
    return _replacement() if has(_FEATURE) else nullcontext()
