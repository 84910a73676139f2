"""The class of a parameter that ZeRO stage 3 has partitioned: whoever needs its values gets them, and may write them.

A partitioned parameter is an empty tensor: reading it, or writing to it, would silently do nothing. So while a
parameter is partitioned, its class intercepts every torch function. A function that needs the shape gets the full
shape. For a function that needs values the engine gathers the parameter, or an error is raised if it cannot. While the
parameter is gathered, its class has no ``__torch_function__``; writes are detected, and kept when it is released.
DeepSpeed sets ``param.ds_status`` when it gathers and partitions; here that changes the class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from operator import attrgetter
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zeroplus.gradients.patches.transforms import outside_transforms
from lightning_zeroplus.weights.errors import PartitionedWeightError
from lightning_zeroplus.weights.gathered import collectively
from lightning_zeroplus.weights.partitioned import copies, initializers, partition, views
from lightning_zeroplus.weights.partitioned.callers import by_an_engine, is_an_engines, torch_frames
from lightning_zeroplus.weights.partitioned.rules import CONVERSIONS, FILLS, Asks, asks

#: The methods of ``GatheredParameters`` that gather and partition, in all supported releases.
_OF_CONTEXTS = ("__enter__", "__exit__", "_exit", "_partition_params")
_DATA: Any = Tensor.data
_NOTES = ("_zeroplus_version", "_zeroplus_given")
_allowed = 0


@contextmanager
def allowed() -> Iterator[None]:
    """Let a partitioned parameter be a plain empty tensor within, for code that handles partitions."""
    global _allowed
    _allowed += 1
    try:
        yield
    finally:
        _allowed -= 1


class WatchedParameter:
    """Mixin for the class of a parameter that stage 3 manages, gathered or not.

    While it is gathered, a write changes the whole weight and not the partitions. :meth:`is_written` detects that by
    autograd's version counter, and by the use of ``data``, whose writes autograd does not count.
    """

    _zeroplus_status: Any
    #: The version when it was equal to the partitions; None: somebody has used ``data`` since.
    _zeroplus_version: int | None = None
    #: Since it was gathered, a user's code may have got its memory, which is its own then: see :meth:`before_giving`.
    _zeroplus_given = False
    #: Called when it is released.
    _zeroplus_released: Callable[[], object] = bool
    #: The class that the parameter had before.
    plain_class: type

    def _set_status(self, status: Any) -> None:
        self._zeroplus_status = status
        cls: Any = type(self)
        # A parameter that DeepSpeed is still gathering counts as partitioned.
        if (status.name != "AVAILABLE") is not issubclass(cls, PartitionedParameter):
            self.__class__ = cls.gathered_class if issubclass(cls, PartitionedParameter) else _partitioned(cls)
        if status.name == "AVAILABLE":
            self._zeroplus_given = False
            self.note_kept()
        else:
            self._zeroplus_released()

    ds_status = property(attrgetter("_zeroplus_status"), _set_status)

    def note_kept(self) -> None:
        """Note that the whole weight and the partitions have the same values."""
        self._zeroplus_version = cast(Any, self)._version

    def is_written(self) -> bool:
        """Whether the whole weight may have been written since :meth:`note_kept`."""
        return self._zeroplus_version != cast(Any, self)._version

    def _get_data(self) -> Any:
        if not is_an_engines(sys._getframe(1)):
            self.before_giving()
            self._zeroplus_version = None
        return _DATA.__get__(self)

    def detach(self) -> Any:
        """As in torch; the tensor follows the weight, as under DDP."""
        if not torch.compiler.is_compiling() and not is_an_engines(sys._getframe(1)):
            self.before_giving()
        return Tensor.detach(cast(Any, self))

    def _set_data(self, value: Any) -> None:
        if not value.numel():
            partition.keep_written(self)  # DeepSpeed releases it
        if not is_an_engines(sys._getframe(1)):
            self.is_assigned(value)
        _DATA.__set__(self, value)

    def note_write(self) -> None:
        """Note that a collective gets the weight and may write to it, which autograd does not count."""
        self._zeroplus_version = None
        note = getattr(super(), "note_write", None)
        if note is not None:
            note()

    def before_giving(self) -> None:
        """Before a user's code gets the memory of the whole weight: let it be the weight's own.

        Then whoever has it besides the weight is a user. A collective may let go of the memory that it has written a
        little later; and with one rank upstream makes the weight a view of its partition.
        """
        param: Any = self
        if self._zeroplus_given or self._zeroplus_status.name != "AVAILABLE":
            return
        with torch.inference_mode(False), torch.no_grad(), outside_transforms():
            # A graph may have views already of one whose module runs.
            is_own = (param.ds_persist or param.ds_active_sub_modules) and not is_in_partition(param)
            _DATA.__set__(self, views.place(self, apart=not is_own))
        self._zeroplus_given = True

    def is_assigned(self, value: Any) -> None:
        """Note that a user assigns ``param.data``.

        Raises:
            PartitionedWeightError: If the value has another dtype, outside of ``zp.gathered()``.
        """
        if value.dtype != cast(Any, self).dtype and not getattr(self, "_zeroplus_gathered", 0):
            raise _dtype_error(self, value.dtype)
        self._zeroplus_version, self._zeroplus_given = None, True

    data = property(_get_data, _set_data)

    def set_(self, *source: Any, **kwargs: Any) -> Any:
        """As ``param.data = tensor``, for a tensor: autograd counts neither as a write."""
        given = source[0] if len(source) == 1 and not kwargs else None
        if not isinstance(given, Tensor) or _allowed or is_an_engines(sys._getframe(1)):
            return super().set_(*source, **kwargs)  # type: ignore[misc]
        _make_whole(self, "set_")
        self.is_assigned(given)
        _DATA.__set__(self, given.detach())
        return self

    # -- for DeepSpeed's `GatheredParameters`, which does not know that one rank may have a weight gathered already

    def _get_all_gather(self) -> Callable[..., Any]:
        caller, gather = sys._getframe(1).f_code.co_name, vars(self)["all_gather"]
        if caller == "__getitem__":  # of `ZeROOrderedDict`: a module's attribute, perhaps on this rank alone
            return vars(self).get("gather_attribute", gather)
        return partial(partition.gather_alike, self, gather) if caller in _OF_CONTEXTS else gather

    def _get_partition(self) -> Callable[..., None]:
        release = vars(self)["partition"]
        is_contexts = sys._getframe(1).f_code.co_name in _OF_CONTEXTS
        return partial(partition.release_unused, self, release) if is_contexts else release

    all_gather = property(_get_all_gather, lambda self, value: vars(self).update(all_gather=value))
    partition = property(_get_partition, lambda self, value: vars(self).update(partition=value))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            this = cast(nn.Parameter, self)
            _make_whole(this, "copy.deepcopy")
            copy = this.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = type(this).plain_class(copy, this.requires_grad)  # type: ignore[attr-defined]
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A plain parameter: DeepSpeed's attributes of it cannot be pickled, and mean nothing elsewhere.
        this = cast(nn.Parameter, self)
        _make_whole(this, "pickle")
        return torch._utils._rebuild_parameter, (this.data, this.requires_grad, {})


class PartitionedParameter:
    """Mixin for the class of a parameter while it is partitioned."""

    gathered_class: type
    data, detach = _DATA, Tensor.detach

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call ``func`` with what it needs of partitioned parameters, or raise :class:`PartitionedWeightError`."""
        kwargs = kwargs or {}
        kind = asks(func, args)
        if kind is Asks.NOTHING or _allowed or by_an_engine(sys._getframe(1)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if kind is Asks.TEXT:
            return _text(args[0])
        if kind is Asks.VALUES:
            return _values(func, args, kwargs, sys._getframe(1))
        with torch._C.DisableTorchFunctionSubclass():
            if kind is Asks.LIKENESS:
                kwargs = {"memory_format": torch.contiguous_format, "device": args[0].device, **kwargs}
            args, kwargs = tree_map_only(PartitionedParameter, _shaped, (args, kwargs))
            return func(*args, **kwargs)


def is_in_partition(param: Any) -> bool:
    """Whether a gathered weight is its partition, as with one rank."""
    return bool(param.untyped_storage().data_ptr() == param.ds_tensor.untyped_storage().data_ptr())


def memory_of(param: Any, new: Tensor | None = None) -> Tensor:
    """The tensor that a parameter is, without a note that somebody has it; ``new`` takes its place."""
    if new is not None:
        _DATA.__set__(param, new)
    return cast(Tensor, _DATA.__get__(param))


def install(module: nn.Module) -> None:
    """Watch the parameters of ``module`` that DeepSpeed has partitioned."""
    partitioned = [(name, param) for name, param in module.named_parameters() if hasattr(param, "ds_id")]
    if partitioned:
        initializers.install(module)
    for name, param in partitioned:
        param._zeroplus_name = name  # type: ignore[attr-defined]
        param._zeroplus_in_flight = getattr(module, "ds_inflight_param_registry", {})  # type: ignore[attr-defined]
        if not isinstance(param, WatchedParameter):
            status = vars(param).pop("ds_status")
            param.__class__ = _watched(type(param))
            param.ds_status = status  # type: ignore[attr-defined]
    if partitioned:
        copies.install(module)


def remove(module: nn.Module) -> None:
    """Undo :func:`install`."""
    copies.remove(module)
    initializers.remove(module)
    for param in module.parameters():
        if isinstance(param, WatchedParameter):
            status = param.ds_status
            param.__class__ = type(param).plain_class
            for name in ("_zeroplus_name", "_zeroplus_status", "_zeroplus_in_flight", views.VIEWED, *_NOTES):
                vars(param).pop(name, None)
            param.ds_status = status


@contextmanager
def unwatched(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Give parameters their plain class within, for code that changes or guards the class."""
    watched: list[Any] = [param for param in params if isinstance(param, WatchedParameter)]
    notes = [{name: vars(param)[name] for name in _NOTES if name in vars(param)} for param in watched]
    for param in watched:
        param.__class__ = type(param).plain_class
        param.ds_status = param._zeroplus_status
    try:
        yield
    finally:
        for param, noted in zip(watched, notes, strict=True):
            status = vars(param).pop("ds_status")
            param.__class__ = _watched(cast(Any, type(param)))
            param.ds_status = status
            vars(param).update(noted)  # it was not gathered now


@lru_cache(None)
def _watched(cls: type) -> type:
    return type(cls.__name__, (WatchedParameter, cls), {"__module__": cls.__module__, "plain_class": cls})


@lru_cache(None)
def _partitioned(cls: type) -> type:
    return type(cls.__name__, (PartitionedParameter, cls), {"__module__": cls.__module__, "gathered_class": cls})


def whole(argument: Any, name: str) -> Any:
    """Return ``argument``, gathered if it is a partitioned parameter.

    Args:
        argument: Anything.
        name: The function that needs it, for the message.

    Raises:
        PartitionedWeightError: If it cannot be gathered.
    """
    if isinstance(argument, PartitionedParameter):
        partition.settle(argument)
        _make_whole(argument, name)
    return argument


def _shaped(param: Any) -> Tensor:
    return torch.empty(param.ds_shape, dtype=param.dtype, device="meta")


def _text(param: Any) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        return (
            f"Parameter {_name(param)!r}, partitioned over the ranks: shape {tuple(param.ds_shape)}, {param.dtype},"
            f" {param.device}, requires_grad={param.requires_grad}"
        )


def _name(param: Any) -> str:
    return cast(str, getattr(param, "_zeroplus_name", "?"))


def _values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
    """Call a function that needs values: without the whole weight if possible, else with gathered ones, or raise."""
    name = getattr(func, "__name__", "")
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PartitionedParameter)]
    for leaf in leaves:
        partition.settle(leaf)  # it is whole afterwards, if upstream was gathering it
    param = next((leaf for leaf in leaves if isinstance(leaf, PartitionedParameter)), None)
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if param is None:
        return _touch(func, args, kwargs, attribute)
    first = param is (args[0] if args else kwargs.get("tensor"))
    if name == "equal" and len(args) == 2:
        with allowed():
            return partition.equal(*args)
    if first and func is Tensor.copy_:
        return partition.copy_(param, *args[1:], **kwargs)
    in_torch = list(torch_frames(frame))
    if first and (
        getattr(func, "__module__", "") == "torch.nn.init" or (name in FILLS and "torch.nn.init" in in_torch)
    ):
        return collectively(param, lambda: func(*args, **kwargs))
    if "Module._apply" in in_torch and (name in CONVERSIONS or name == "__set__"):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if name == "__set__" or result.dtype == param.dtype:  # type: ignore[attr-defined]
            return result
        raise _dtype_error(param, result.dtype)
    if _gather(args, kwargs):
        return _touch(func, args, kwargs, attribute)
    raise _error(param, f"param.{attribute}" if name in ("__get__", "__set__") else name)


def _touch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], attribute: str) -> Any:
    """Call ``func`` with gathered parameters, and note what it may write."""
    if attribute == "data" and func.__name__ == "__set__":
        args[0].is_assigned(args[1])
    result = func(*args, **kwargs)
    if attribute == "data" and func.__name__ == "__get__":
        args[0]._zeroplus_version = None
    return result


def _gather(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Gather the partitioned parameters among these arguments; returns whether their engines could."""
    engines: dict[Any, list[Any]] = {}
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, PartitionedParameter):
            engines.setdefault(getattr(leaf, "read_whole", None), []).append(leaf)
    return None not in engines and all(read(params) for read, params in engines.items())


def _make_whole(param: Any, name: str) -> None:
    if isinstance(param, PartitionedParameter) and not _allowed and not _gather((param,), {}):
        raise _error(param, name)


def _error(param: Any, name: str) -> PartitionedWeightError:
    return PartitionedWeightError(
        f"The parameter {_name(param)!r} is partitioned over the ranks (ZeRO stage 3), and `{name}` needs its values."
        " Read and write whole weights on all ranks within `with zp.gathered(module_or_params): ...`; update a teacher"
        " by `zp.ema_update(teacher, student, decay)`."
    )


def _dtype_error(param: Any, dtype: torch.dtype) -> PartitionedWeightError:
    return PartitionedWeightError(
        f"The parameter {_name(param)!r} is of {param.dtype}, and cannot change to {dtype} during the fit: at ZeRO"
        " stage 3 its partitions share a buffer with others. Choose the dtype by `Trainer(precision=...)`, or convert"
        " the module before the fit."
    )
