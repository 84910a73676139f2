"""Whole weights of a module that FSDP2 has sharded.

FSDP2's own unsharded parameters have the dtype of computation and are not written back. The parameters here have the
dtype of the shards, and replace the sharded parameters in the module until :meth:`ShardedWeights.hide`. While a forward
runs within, the sharded parameters are back, with what was written, so that it trains as usual.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_zeroplus.fsdp.whole.link import follow_grad
from lightning_zeroplus.fsdp.whole.tensor import WholeDTensor
from lightning_zeroplus.weights import agreement
from lightning_zeroplus.weights.partitioned.copies import from_engine, ordinary_state


class _Place(NamedTuple):
    module: nn.Module
    name: str
    sharded: nn.Parameter
    whole: nn.Parameter


class ShardedWeights:
    """The kind of :class:`~lightning_zeroplus.weights.gathered.WholeWeights` for FSDP2.

    Args:
        source: A module, or parameters.

    Attributes:
        whole: The whole parameters in the order of ``source``, or of the module's sharded parameters. Parameters that
            are not sharded are in it unchanged.
    """

    def __init__(self, source: nn.Module | Iterable[nn.Parameter]) -> None:
        self.module = source if isinstance(source, nn.Module) else None
        self.params = [] if isinstance(source, nn.Module) else list(source)
        self.whole: list[nn.Parameter] = []
        self._places: list[_Place] = []
        self._pairs: dict[nn.Parameter, nn.Parameter] = {}
        self._handles: list[Any] = []
        self._versions: list[int] = []
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        self._silenced: list[tuple[nn.Module, Any]] = []
        self._copiers: list[tuple[nn.Module, Any]] = []

    def show(self) -> None:
        if self.module is not None:
            for unit in self.module.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()  # a root may still be unsharded
            self.params = [param for param in self.module.parameters() if isinstance(param, DTensor)]
        for param in self.params:
            if isinstance(param, DTensor) and param not in self._pairs:
                full = cast(DTensor, param.detach()).full_tensor()
                whole = nn.Parameter(full.clone() if full is param.data else full, param.requires_grad)
                self._pairs[param] = follow_grad(whole, param)
                self._before[param] = cast(DTensor, param).to_local().detach().clone()
        self.whole.extend(self._pairs.get(param, param) for param in self.params)
        self._versions = [_version(param) for param in self._pairs]
        if self.module is not None:
            self._find_places(self.module)
            self._put_whole()

    def _find_places(self, root: nn.Module) -> None:
        for module in root.modules():
            for name, param in module._parameters.items():
                if param in self._pairs:
                    self._places.append(_Place(module, name, param, self._pairs[param]))
            self._silence(module)
            vars(module)["__getstate__"] = partial(ordinary_state, module)
            if isinstance(module, FSDPModule):
                before = module.register_forward_pre_hook(self._before_forward, prepend=True)
                after = module.register_forward_hook(self._after_forward, always_call=True)
                self._handles += [before, after]
                self._copiers.append((module, vars(module).get("__deepcopy__")))
                vars(module)["__deepcopy__"] = partial(_ordinary_copy, module)
                vars(module)["__reduce_ex__"] = partial(_reduce, module)

    def _silence(self, module: nn.Module) -> None:
        """Remove FSDP2's hook of ``load_state_dict``, which expects sharded parameters."""
        hooks = module._load_state_dict_post_hooks
        kept = type(hooks)((key, hook) for key, hook in hooks.items() if not from_engine(hook))
        self._silenced.append((module, hooks))
        module._load_state_dict_post_hooks = kept

    def _put_whole(self) -> None:
        for module, name, _, whole in self._places:
            module._parameters[name] = whole

    def _put_sharded(self) -> None:
        for module, name, sharded, _ in self._places:
            module._parameters[name] = sharded

    def _before_forward(self, *_: Any) -> None:
        self._write()
        self._put_sharded()

    def _after_forward(self, *_: Any) -> None:
        assert self.module is not None
        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
        self._put_whole()

    @torch.no_grad()
    def _write(self) -> None:
        for sharded, whole in self._pairs.items():
            mesh, placements = sharded.device_mesh, sharded.placements  # type: ignore[attr-defined]
            data = whole.data.to(sharded.dtype)
            mine = distribute_tensor(data, mesh, placements, src_data_rank=None).to_local()
            local = sharded.to_local()  # type: ignore[attr-defined]
            if not torch.equal(
                self._before[sharded], mine.to(local.device)
            ):  # else what was written to the shard stays
                local.copy_(mine)
                self._before[sharded] = local.detach().clone()

    def hide(self, writer: int | None) -> None:
        try:
            problem = self._check()
            found = _everywhere((problem, agreement.checksum(w.data for w in self.whole) if writer is None else None))
            problems = [each[0] for each in found if each[0] is not None]
            if problems:
                raise ValueError(problems[0])
            if any(each[1] != found[0][1] for each in found):
                raise RuntimeError(
                    "The ranks have written different values within zp.gathered(); keeping them would mix partitions of"
                    " different weights. Write the same on all ranks, or name the rank whose values count:"
                    " zp.gathered(..., writer=0)."
                )
            if writer is not None:
                for whole in self._pairs.values():
                    data = whole.data.contiguous()
                    dist.broadcast(data, writer)
                    whole.data = data
            self._write()
        finally:
            self._leave()

    def give_up(self) -> None:
        try:
            if self._check() is None:
                self._write()
        finally:
            self._leave()

    def _check(self) -> str | None:
        for sharded, whole in self._pairs.items():
            if whole.shape != sharded.shape:
                return (
                    f"A parameter was given the shape {tuple(whole.shape)} within zp.gathered(). It must keep the shape"
                    f" {tuple(sharded.shape)}."
                )
        ours = all(isinstance(param, WholeDTensor) for param in self._pairs)  # writes to the shards count as well
        if self.module is None and not ours and self._versions != [_version(param) for param in self._pairs]:
            return (
                "A sharded parameter was written to within zp.gathered(). Write to the parameters that it yields:"
                " `with zp.gathered(params) as whole: ...`."
            )
        return None

    def _leave(self) -> None:
        self._put_sharded()
        for handle in self._handles:
            handle.remove()
        for module, hooks in reversed(self._silenced):
            module._load_state_dict_post_hooks = hooks
        if self.module is not None:
            for module in self.module.modules():
                for name in ("__getstate__", "__deepcopy__", "__reduce_ex__"):
                    vars(module).pop(name, None)
        for module, copier in self._copiers:
            if copier is not None:
                vars(module)["__deepcopy__"] = copier  # the strategy's own


def _reduce(module: nn.Module, protocol: Any) -> Any:
    """Reduce to an ordinary module, of the class that it had before it was sharded."""
    return _blank, (type(module).__mro__[2],), ordinary_state(module)


def _blank(cls: Any) -> Any:
    return cls.__new__(cls)


def _version(param: Any) -> int:
    return cast(int, param.to_local()._version)


def _ordinary_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    copy: nn.Module = _blank(type(module).__mro__[2])
    memo[id(module)] = copy
    vars(copy).update(deepcopy(ordinary_state(module), memo))
    return copy


def _everywhere(value: Any) -> list[Any]:
    if not agreement.is_distributed():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
