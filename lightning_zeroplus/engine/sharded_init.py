"""Let initialization code reach parameters that ``deepspeed.zero.Init`` has partitioned already.

``zero.Init`` partitions a module's parameters when the module's constructor returns. A parent that then initializes a
child's parameters, as ``nn.MultiheadAttention`` does with its output projection, writes to empty tensors: nothing is
raised, and the weights are not those that the code asks for.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# How many elements stay gathered at most. What was touched longest ago is partitioned again first.
_KEEP_ELEMENTS = 2**28
# Attributes that show a parameter's values or shape. Others are the same for a partitioned parameter.
_TELLING_ATTRIBUTES = frozenset({"data", "shape", "ndim", "T", "mT"})


class InitThroughPartitions(TorchFunctionMode):
    """Within ``zero.Init``: gather a partitioned parameter when code outside DeepSpeed touches it.

    It stays gathered, because ``param.data`` and views may be written to later, until the context ends or too much is
    gathered; then rank 0's values are partitioned. All ranks must run the same code, as ``zero.Init`` requires anyway.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gathered: OrderedDict[int, Any] = OrderedDict()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Gather the partitioned parameters among the arguments, then call ``func``."""
        kwargs = kwargs or {}
        if _tells(func) and not _called_by_deepspeed():
            for value in tree_leaves((args, kwargs)):
                if getattr(value, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE:
                    self._gather(value)
        return func(*args, **kwargs)

    def _gather(self, param: Any) -> None:
        # Not GatheredParameters: module.apply() under zero.Init opens one, and they may not overlap.
        param.all_gather()
        self._gathered[param.ds_id] = param
        while len(self._gathered) > 1 and sum(p.ds_numel for p in self._gathered.values()) > _KEEP_ELEMENTS:
            self._partition(self._gathered.popitem(last=False)[1])

    def _partition(self, param: Any) -> None:
        if param.ds_status is ZeroParamStatus.AVAILABLE:
            group = param.ds_process_group
            comm.broadcast(param.data, comm.get_global_rank(group, 0), group=group)
            param.partition(has_been_updated=True)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Partition what was gathered."""
        super().__exit__(kind, value, trace)
        while self._gathered and kind is None:
            self._partition(self._gathered.popitem()[1])


def _tells(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func, "__self__", None) in _GETTERS
    return name not in ("__set__", "requires_grad_")


_GETTERS = [getattr(torch.Tensor, name) for name in sorted(_TELLING_ATTRIBUTES)]


def _called_by_deepspeed() -> bool:
    # Frames: this one, __torch_function__, and the caller of the torch function.
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("deepspeed.")
