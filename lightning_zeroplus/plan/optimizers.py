"""What an optimizer needs: it is run on the meta device, and its tensors are counted."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_zeroplus.engine.optimizer.elementwise import needs_whole_tensors

#: The shapes of some tensors, and their dtype.
Tensors = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class Need(NamedTuple):
    """What the step of one parameter group needs.

    Attributes:
        states: Bytes that stay.
        working: The most bytes that exist within the step only.
    """

    states: int
    working: int


class OptimizersOnMeta:
    """The torch optimizers of a module.

    Args:
        optimizers: Their parameters are on the meta device. They are not changed.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.groups = [(optimizer, index) for optimizer in optimizers for index in range(len(optimizer.param_groups))]
        self._needs: dict[tuple[int, Tensors], Need] = {}
        self._whole: dict[int, bool] = {}

    def need(self, group: int, tensors: Sequence[tuple[Sequence[int], torch.dtype]]) -> Need:
        """What a step needs if the parameters of a group are these.

        Args:
            group: The group, counted over all optimizers.
            tensors: Shape and dtype of each parameter.

        Raises:
            ValueError: If the optimizer's step does not run on the meta device.
        """
        key = group, tuple((tuple(shape), dtype) for shape, dtype in tensors)
        if key not in self._needs:
            self._needs[key] = _measured(*self.groups[group], key[1])
        return self._needs[key]

    def needs_whole(self, group: int) -> bool:
        """Whether a group's update needs whole tensors, as Muon's does, instead of slices of a flat partition."""
        if group not in self._whole:
            optimizer, index = self.groups[group]
            is_matrix = any(param.ndim > 1 for param in optimizer.param_groups[index]["params"])
            copy = _with_only(optimizer, index, [nn.Parameter(torch.zeros((2, 2) if is_matrix else 2))])
            self._whole[group] = needs_whole_tensors(copy)
        return self._whole[group]


def _measured(optimizer: Optimizer, group: int, tensors: Tensors) -> Need:
    params = [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape, dtype in tensors]
    for param in params:
        param.grad = torch.empty_like(param)
    try:
        copy = _with_only(optimizer, group, params)
        copy.step()
        with _Meter() as meter:
            copy.step()  # the states are there now
    except Exception as error:
        raise ValueError(
            f"The step of `{type(optimizer).__name__}` cannot be run on the meta device, where its states are counted:"
            f" {type(error).__name__}: {error} Plan with a similar optimizer of torch:"
            " `--optimizer torch.optim.AdamW --optimizer.lr 1e-3`."
        ) from error
    states = {
        value.untyped_storage()._cdata: value.untyped_storage().nbytes()
        for state in copy.state.values()
        for value in tree_leaves(state)
        if isinstance(value, Tensor) and value.is_meta
    }
    is_fused = bool(optimizer.param_groups[group].get("fused"))
    return Need(sum(states.values()), 0 if is_fused else meter.peak)


def _with_only(optimizer: Optimizer, group: int, params: list[nn.Parameter]) -> Any:
    """An optimizer of the same settings and without states, with these parameters in one group."""
    settings = {**optimizer.param_groups[group], "params": params}
    if settings.get("foreach", ...) is None and not settings.get("fused"):
        settings["foreach"] = True  # torch's choice on a GPU
    if "fused" in settings:
        settings["fused"] = None  # one kernel, which needs nothing; there is none for the meta device
    if isinstance(optimizer, Adagrad):  # makes its states in its constructor
        return type(optimizer)([settings], **{**optimizer.defaults, "fused": None})
    copy: Any = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    copy.param_groups, copy.state = [settings], defaultdict(dict)
    return copy


class _Meter(TorchDispatchMode):
    """The most bytes of new tensors on the meta device that exist at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.is_meta:
                storage = each.untyped_storage()
                if storage._cdata not in old and storage._cdata not in self._seen:
                    self._see(storage)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        self._now += size
        self.peak = max(self.peak, self._now)

        def freed(_: Any) -> None:
            self._now -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, freed)
