"""Build a module whose parameters are partitioned as soon as they are made, with the values that its code asks for.

``zero.Init`` partitions a module's parameters when the module's constructor returns. If a parent then initializes a
child's parameters, as ``nn.MultiheadAttention`` does with its output projection, it writes to empty tensors. No error
is raised, and the weights are wrong.

``zero.Init`` also replaces the functions that make tensors: they ignore the default device and the requested dtype.
Buffers in float64 become fp32. Code that builds a module on the meta device and fills it later, as ``from_pretrained``
does, gets uninitialized memory.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus, get_all_subclasses
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

from lightning_zeroplus.engine.upstream.scalars import ScalarsAsBytes
from lightning_zeroplus.gradients.patches.replacement import Replacement

# How many elements stay gathered at most. Parameters gathered longest ago are partitioned again first.
_KEEP_ELEMENTS = 2**28
# What a constructor that upstream has wrapped leaves on the module until it returns.
_MARK = "_ds_child_entered"
# Attributes that depend on a parameter's values or shape. Others are the same for a partitioned parameter.
_TELLING_ATTRIBUTES = frozenset({"data", "shape", "ndim", "T", "mT"})


@contextmanager
def sharded_init(config: dict[str, Any], remote_device: str | None) -> Iterator[None]:
    """Partition every parameter within, when the constructor of its module returns.

    Args:
        config: A complete DeepSpeed config of stage 3.
        remote_device: The device of the partitions: ``"cpu"``, or None for the accelerator.
    """
    init = ShardedInit(config, remote_device)
    with _wrappers_without_mark(), init, ScalarsAsBytes(), OnDevice(init.local_device), InitThroughPartitions():
        yield


@contextmanager
def _wrappers_without_mark() -> Iterator[None]:
    """Let upstream ask a wrapper for its mark, at the beginning of the constructor.

    The ``__getattr__`` of torch's ``checkpoint_wrapper`` would look in the module that it wraps, which is not there
    yet, and so call itself without end.
    """

    def without_mark(get: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def get_attribute(module: Any, name: str) -> Any:
            if name == _MARK:
                raise AttributeError(name)
            return get(module, name)

        return get_attribute

    with ExitStack() as stack:
        for cls in get_all_subclasses(nn.Module, include_root=False):
            if "__getattr__" in vars(cls):
                stack.enter_context(Replacement(cls, "__getattr__", without_mark(vars(cls)["__getattr__"]))())
        yield


class ShardedInit(Init):
    """``zero.Init`` that only partitions: tensors keep the device and dtype that the code asks for.

    Relies on upstream: its patches of constructors call the methods that are overridden here.

    Args:
        config: A complete DeepSpeed config. As at the other stages, it names the dtype to which real floating-point
            parameters are cast in 16-bit precisions; buffers are not cast.
        remote_device: See :func:`sharded_init`.
    """

    def __init__(self, config: dict[str, Any], remote_device: str | None) -> None:
        super().__init__(config_dict_or_path=config, remote_device=remote_device)

    def _add_tensor_creation_wrappers(self) -> None:
        """Do nothing: tensors have the dtype and the device that the code asks for."""

    def _remove_tensor_creation_wrappers(self) -> None:
        """Do nothing: there is nothing to undo."""

    def _post_init_method(self, module: nn.Module) -> None:
        """Skip modules on the meta device: :func:`partition_whole_parameters` partitions them once they are filled."""
        if not any(param.is_meta for param in module.parameters(recurse=False)):
            super()._post_init_method(module)

    def _zero_init_param(self, param: nn.Parameter) -> None:
        """Cast a parameter, then broadcast and partition it."""
        if self.dtype != torch.float32 and param.is_floating_point():
            param.data = param.data.to(self.dtype)
        super()._zero_init_param(param)


class _InitOfAnyDtype(Init):
    """``zero.Init`` that takes its dtype from the config.

    Upstream's optimizer gives it the dtype of the module's first parameter, and it refuses all but three dtypes.
    """

    def __init__(self, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


#: Within, upstream partitions a module whose first parameter is frozen and of any dtype.
any_first_dtype = Replacement(parameter_offload, "Init", _InitOfAnyDtype)


def partition_whole_parameters(module: nn.Module, config: dict[str, Any]) -> None:
    """Partition the parameters that :func:`sharded_init` has left whole, if it has partitioned others of the module.

    If one parameter is partitioned, upstream assumes that all are, and that the module has its dtype and device.
    """
    params = list(module.parameters())
    if any(hasattr(param, "ds_id") for param in params):
        init = ShardedInit(config, None)
        with ScalarsAsBytes():
            init._convert_to_zero_parameters([param for param in params if not hasattr(param, "ds_id")])
        for buffer in module.buffers():
            buffer.data = buffer.data.to(init.local_device)


class OnDevice(TorchFunctionMode):
    """Make tensors on ``device`` within if the call names no device, as ``with device`` does.

    Calls from transformers are left alone. It finds out the default device by ``torch.tensor([]).device``, and
    ``from_pretrained`` would load the whole model there, which may not fit unless it is partitioned.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Pass ``device`` to a function that makes tensors, unless the call names one."""
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None and not _called_by("transformers."):
            kwargs["device"] = self.device
        return func(*args, **kwargs)


class InitThroughPartitions(TorchFunctionMode):
    """Gather a partitioned parameter when code outside DeepSpeed touches it, within ``zero.Init``.

    It stays gathered until the context ends or too much is gathered, because ``param.data`` and views may be written to
    later. Then rank 0's values are partitioned. All ranks must run the same code, as ``zero.Init`` requires anyway.
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
        # Not GatheredParameters: module.apply() under zero.Init opens one, and two must not overlap.
        param.all_gather()
        self._gathered[param.ds_id] = param
        while len(self._gathered) > 1 and sum(p.ds_numel for p in self._gathered.values()) > _KEEP_ELEMENTS:
            self._partition(self._gathered.popitem(last=False)[1])

    def _partition(self, param: Any) -> None:
        if param.ds_status is ZeroParamStatus.AVAILABLE:
            group = param.ds_process_group
            if param.shape != param.ds_shape:  # `weight.data = tensor`, as resized embeddings have it
                param.ds_shape, param.ds_numel, param.ds_tensor = param.shape, param.numel(), None
            comm.broadcast(param.data, comm.get_global_rank(group, 0), group=group)
            param.partition(has_been_updated=True)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Partition what was gathered, unless an exception was raised."""
        super().__exit__(kind, value, trace)
        while self._gathered and kind is None:
            self._partition(self._gathered.popitem()[1])


def _tells(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func, "__self__", None) in _GETTERS
    if name == "__set__":
        return getattr(func, "__self__", None) is torch.Tensor.data  # what is assigned is partitioned in the end
    return name != "requires_grad_"


_GETTERS = [getattr(torch.Tensor, name) for name in sorted(_TELLING_ATTRIBUTES)]


def _called_by(package: str) -> bool:
    # Frames: this one, __torch_function__, and the caller of the torch function.
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(package)
