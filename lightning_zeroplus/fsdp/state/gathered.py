"""Whole weights of a module that FSDP2 has sharded.

FSDP2's own unsharded parameters have the dtype of computation and are not written back. The parameters here have the
dtype of the shards, and replace the sharded parameters in the module until :meth:`ShardedWeights.hide`. While a forward
runs within, the sharded parameters are back, with what was written, so that it trains as usual.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_zeroplus.fsdp.whole.layout import as_stored, scatter
from lightning_zeroplus.fsdp.whole.link import Link, follow_grad
from lightning_zeroplus.fsdp.whole.restore import LeftWeight
from lightning_zeroplus.fsdp.whole.tensor import WholeDTensor
from lightning_zeroplus.weights import agreement
from lightning_zeroplus.weights.partitioned.copies import from_engine, ordinary_state

_DATA: Any = Tensor.data


class _Place(NamedTuple):
    module: nn.Module
    name: str
    sharded: nn.Parameter
    whole: nn.Parameter

    @property
    def own(self) -> nn.Parameter:
        """The form that is registered outside of ``zp.gathered()`` now."""
        link = getattr(self.sharded, "link", None)
        return self.sharded if link is None or not link.group.is_unsharded else cast(nn.Parameter, link.unsharded)


class _Shown:
    """A sharded parameter with its whole copy. The parameter itself is read and written through the copy meanwhile.

    So it is on every rank, also on one whose unit stays unsharded for a graph: others may have sharded theirs.

    Args:
        sharded: The parameter; all ranks make one together.

    Attributes:
        whole: The copy, in full shape.
    """

    def __init__(self, sharded: Any) -> None:
        self._sharded = sharded
        self._link = getattr(sharded, "link", None)
        is_open = self._link is not None and self._link.group.is_unsharded
        if self._link is not None:
            self._link.settle()
            self._link.group.give_back()
        with as_stored() if isinstance(sharded, LeftWeight) else nullcontext():
            full = sharded.detach().full_tensor()
            whole = nn.Parameter(full.clone() if full is sharded.data else full, sharded.requires_grad)
        self.whole = follow_grad(whole, sharded)
        self._first = self._before = sharded._local_tensor.detach().clone()
        self._open = full.clone() if is_open else None  # to see whether the copy was written, or the open unit
        self._counted = _counted(self.whole)
        self.turn(on=True)

    def turn(self, on: bool) -> None:
        """Let the copy stand for the parameter, or not."""
        if self._link is not None:
            self._link.show(self if on else None)

    @torch.no_grad()
    def write(self) -> None:
        """Copy what was written to the copy to the shards; no collective."""
        before, self._counted, link = self._counted, _counted(self.whole), self._link
        if link is not None and self._counted != before:
            link.before_write(is_counted=True)
        with as_stored():
            sharded = self._sharded
            local = sharded._local_tensor
            mine = scatter(self.whole.data, sharded)._local_tensor
            if not torch.equal(self._before, mine):  # else what was written to the shard stays
                local.copy_(mine)
                self._before = local.detach().clone()
        if link is not None and link.group.is_unsharded:
            self._follow(link)

    def _follow(self, link: Link) -> None:
        """Give the new values to a unit that stays unsharded."""
        before = _DATA.__get__(link.unsharded) if self._open is None else self._open
        now = _DATA.__get__(self.whole)
        if not torch.equal(before, now.to(before.dtype)):
            self._open = now.clone()
            link.before_write()
            shown, link.shown = link.shown, None  # so that it goes to the unit, and not to this copy
            link.stored(now)
            link.shown = shown

    @torch.no_grad()
    def revert(self) -> None:
        """Give the shards the values from before."""
        if self._link is not None:
            self._link.before_write(is_counted=True)
        with as_stored():
            self._sharded._local_tensor.copy_(self._first)


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
        self._pairs: dict[nn.Parameter, _Shown] = {}
        self._handles: list[Any] = []
        self._versions: list[int] = []
        self._silenced: list[tuple[nn.Module, Any]] = []
        self._copiers: list[tuple[nn.Module, Any]] = []

    def show(self) -> None:
        if self.module is not None:
            for unit in self.module.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()  # a root may still be unsharded
            self.params = [param for *_, param in _registered(self.module)]
        for param in self.params:
            if isinstance(param, DTensor) and param not in self._pairs and _shown(param) is None:
                self._pairs[param] = _Shown(param)
        self.whole.extend(self._whole_of(param) for param in self.params)
        self._versions = [_version(param) for param in self._pairs]
        if self.module is not None:
            self._find_places(self.module)
            self._put_whole()

    def _whole_of(self, param: nn.Parameter) -> nn.Parameter:
        shown = self._pairs[param] if param in self._pairs else _shown(param)
        return param if shown is None else shown.whole

    def _find_places(self, root: nn.Module) -> None:
        self._places = [_Place(*place, self._whole_of(place[-1])) for place in _registered(root)]
        for module in root.modules():
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
        for place in self._places:
            place.module._parameters[place.name] = place.own

    def _before_forward(self, *_: Any) -> None:
        self._write()
        self._turn(on=False)
        self._put_sharded()

    def _after_forward(self, *_: Any) -> None:
        assert self.module is not None
        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
        self._turn(on=True)
        self._put_whole()

    def _write(self) -> None:
        for shown in self._pairs.values():
            shown.write()

    def _turn(self, on: bool) -> None:
        for shown in self._pairs.values():
            shown.turn(on)

    def hide(self, writer: int | None) -> None:
        try:
            problem = self._check()
            found = _everywhere((problem, agreement.checksum(w.data for w in self.whole) if writer is None else None))
            problems = [each[0] for each in found if each[0] is not None]
            differ = any(each[1] != found[0][1] for each in found)
            for shown in self._pairs.values() if problems or differ else ():
                shown.revert()
            if problems:
                raise ValueError(problems[0])
            if differ:
                raise RuntimeError(
                    "The ranks have written different values within zp.gathered(); keeping them would mix partitions of"
                    " different weights. Write the same on all ranks, or name the rank whose values count:"
                    " zp.gathered(..., writer=0)."
                )
            if writer is not None:
                for shown in self._pairs.values():
                    there = Tensor.detach(shown.whole)  # in place, so that views of the weight follow it
                    data = there.contiguous()
                    dist.broadcast(data, writer)
                    if not torch.equal(there, data):
                        there.copy_(data)
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
        for sharded, shown in self._pairs.items():
            if shown.whole.shape != sharded.shape:
                return (
                    f"A parameter was given the shape {tuple(shown.whole.shape)} within zp.gathered(). It must keep the"
                    f" shape {tuple(sharded.shape)}."
                )
        ours = all(isinstance(param, WholeDTensor) for param in self._pairs)  # writes to the shards count as well
        if self.module is None and not ours and self._versions != [_version(param) for param in self._pairs]:
            return (
                "A sharded parameter was written to within zp.gathered(). Write to the parameters that it yields:"
                " `with zp.gathered(params) as whole: ...`."
            )
        return None

    def _leave(self) -> None:
        self._turn(on=False)
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


def _registered(root: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """The places of parameters, in whichever form they are registered now, and their sharded form.

    Elsewhere are copies of an outer ``zp.gathered()``, which need no other one.
    """
    found: list[tuple[nn.Module, str, Any]] = []
    for module in root.modules():
        for name, param in cast(dict[str, Any], module._parameters).items():
            link = getattr(param, "link", None)
            if isinstance(param, DTensor):
                found.append((module, name, param))
            elif link is not None and param is link.unsharded:
                found.append((module, name, link.sharded))
    return found


def _reduce(module: nn.Module, protocol: Any) -> Any:
    """Reduce to an ordinary module, of the class that it had before it was sharded."""
    return _blank, (type(module).__mro__[2],), ordinary_state(module)


def _blank(cls: Any) -> Any:
    return cls.__new__(cls)


def _shown(param: Any) -> _Shown | None:
    """What stands for a parameter already, within another ``zp.gathered()``."""
    return getattr(getattr(param, "link", None), "shown", None)


def _counted(tensor: Tensor) -> int:
    """How many writes autograd has counted."""
    return 0 if tensor.is_inference() else tensor._version


def _version(param: Any) -> int:
    return cast(int, param._local_tensor._version)


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
