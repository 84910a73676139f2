"""Build a module whose parameters are partitioned as soon as they are made, with the values that its code asks for.

``zero.Init`` partitions a module's parameters when the module's constructor returns. A parent that then initializes a
child's parameters, as ``nn.MultiheadAttention`` does with its output projection, writes to empty tensors: nothing is
raised, and the weights are not those that the code asks for.

``zero.Init`` also replaces the functions that make tensors, such that they disregard the default device and the dtype
that was asked for: buffers in float64 become fp32, and code that builds a module on the meta device and fills it later,
as ``from_pretrained`` does, gets memory that nobody has written to.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

from lightning_zeroplus.engine.upstream.scalars import ScalarsAsBytes

# How many elements stay gathered at most. What was touched longest ago is partitioned again first.
_KEEP_ELEMENTS = 2**28
# Attributes that show a parameter's values or shape. Others are the same for a partitioned parameter.
_TELLING_ATTRIBUTES = frozenset({"data", "shape", "ndim", "T", "mT"})


@contextmanager
def sharded_init(config: dict[str, Any], remote_device: str | None) -> Iterator[None]:
    """Within, every parameter is partitioned when the constructor of its module returns.

    Args:
        config: A complete DeepSpeed config of stage 3.
        remote_device: Where partitions are kept: ``"cpu"``, or None for the accelerator.
    """
    init = ShardedInit(config, remote_device)
    with init, ScalarsAsBytes(), OnDevice(init.local_device), InitThroughPartitions():
        yield


class ShardedInit(Init):
    """``zero.Init`` that partitions, and leaves all else as the code asks for it.

    It relies on these methods of upstream, which its patches of constructors call.

    Args:
        config: A complete DeepSpeed config; it says to which dtype parameters are cast, as at the other stages: only
            real floating-point ones, under 16-bit precisions, and no buffers.
        remote_device: See :func:`sharded_init`.
    """

    def __init__(self, config: dict[str, Any], remote_device: str | None) -> None:
        super().__init__(config_dict_or_path=config, remote_device=remote_device)

    def _add_tensor_creation_wrappers(self) -> None:
        """Nothing: tensors have the dtype and the device that the code asks for."""

    def _remove_tensor_creation_wrappers(self) -> None:
        """Nothing to undo."""

    def _post_init_method(self, module: nn.Module) -> None:
        """Leave a module on the meta device to whoever fills it; what that makes is partitioned with the engine."""
        if not any(param.is_meta for param in module.parameters(recurse=False)):
            super()._post_init_method(module)

    def _zero_init_param(self, param: nn.Parameter) -> None:
        """Cast, broadcast and partition."""
        if self.dtype != torch.float32 and param.is_floating_point():
            param.data = param.data.to(self.dtype)
        super()._zero_init_param(param)


def partition_whole_parameters(module: nn.Module, config: dict[str, Any]) -> None:
    """Partition what :func:`sharded_init` has left whole in a module that it has partitioned in part.

    Upstream takes a module with one partitioned parameter for one that is all partitioned, in its dtype, on its device.
    """
    params = list(module.parameters())
    if any(hasattr(param, "ds_id") for param in params):
        init = ShardedInit(config, None)
        with ScalarsAsBytes():
            init._convert_to_zero_parameters([param for param in params if not hasattr(param, "ds_id")])
        for buffer in module.buffers():
            buffer.data = buffer.data.to(init.local_device)


class OnDevice(TorchFunctionMode):
    """Within: tensors for which no device is named are made on ``device``, as within ``with device``.

    Not those that transformers makes itself. It asks ``torch.tensor([]).device`` where tensors are made, and
    ``from_pretrained`` would load a whole model there, one that may not fit there unless it is partitioned.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Name the device, where a function that makes tensors is told none."""
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None and not _called_by("transformers."):
            kwargs["device"] = self.device
        return func(*args, **kwargs)


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
        if _tells(func) and not _called_by("deepspeed."):
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


def _called_by(package: str) -> bool:
    # Frames: this one, __torch_function__, and the caller of the torch function.
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(package)
