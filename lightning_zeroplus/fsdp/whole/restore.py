"""Undo ``fully_shard``: the module becomes ordinary again, with the parameters that it had before."""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from lightning_zeroplus.fsdp.late_grads import groups
from lightning_zeroplus.fsdp.whole.aliases import OutsideMemory
from lightning_zeroplus.fsdp.whole.layout import GIVEN, KEPT, as_stored
from lightning_zeroplus.fsdp.whole.rules import METADATA
from lightning_zeroplus.fsdp.whole.sides import UnshardedParameter
from lightning_zeroplus.fsdp.whole.tensor import WholeDTensor
from lightning_zeroplus.weights.errors import PartitionedWeightError
from lightning_zeroplus.weights.partitioned.copies import install, remove, without_engine


class KeptWeight(WholeDTensor):
    """What a user has kept of a sharded weight, after the fit: it follows the whole weight, also into the next fit."""

    weight: Tensor

    @classmethod
    def stands(cls, kept: Any, weight: Tensor) -> None:
        """Let ``kept`` stand for what shares the memory of ``weight`` now."""
        vars(kept).pop("link", None)
        kept.__class__, kept.weight = cls, weight

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` with the weights' own memory."""
        args, kwargs = tree_map_only(KeptWeight, lambda kept: kept.weight.detach(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = copy.deepcopy(self.weight.detach(), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.weight.detach().__reduce_ex__(protocol)


class LeftWeight(DTensor):
    """This rank's part of a weight, after a fit that has failed. ``zp.gathered()`` gathers it, and the next fit."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse what needs values: an operation on the parts would give each rank another result.

        ``full_tensor()`` and ``to_local()``, also of ``detach()``, say themselves what they mean.
        """
        name = func.__name__ if func.__name__ != "__get__" else getattr(func, "__self__", func).__name__
        if name in _KNOWN:
            with as_stored():
                result = func(*args, **(kwargs or {}))
                if type(result) is DTensor:
                    result.__class__ = cls
                return result
        raise PartitionedWeightError(
            f"`{name}` of a weight after a fit that has failed: each rank still has its part of it, and other ranks may"
            " have ended. Read it within zp.gathered(module), or begin another fit with strategy='zeroplus_fsdp', which"
            " gathers the weights first. All ranks must do so."
        )


#: What is known of a weight without its values.
_KNOWN = METADATA | {
    "detach",
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "requires_grad",
    "is_leaf",
    "is_meta",
    "itemsize",
}


def leave(sharded: Iterable[Any]) -> None:
    """Leave parameters sharded; :func:`restore` may follow."""
    for param in sharded:
        param.__class__ = LeftWeight


def units_of(module: nn.Module) -> list[Any]:
    """The modules in ``module`` that ``fully_shard`` was applied to."""
    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def shard(units: Iterable[Any]) -> None:
    """Register the sharded parameters of all units, including units that an evaluation has left unsharded."""
    for unit in units:
        unit.reshard()
        for group in groups(unit):
            if group.is_unsharded:  # it runs, as far as FSDP2 knows: an exception has ended the fit
                group._to_sharded()


def restore(
    module: nn.Module, units: Iterable[Any], originals: Mapping[Tensor, nn.Parameter], optimizers: Iterable[Optimizer]
) -> None:
    """Give ``module`` whole parameters on the CPU, and remove FSDP2's hooks and classes; a collective.

    Args:
        module: The module.
        units: The module's units; they are sharded, and no forward or backward runs.
        originals: By sharded parameter, the parameter before it was sharded, which was emptied. It is filled again:
            whoever has kept the parameter, or its hooks, then has the trained one.
        optimizers: Optimizers of the sharded parameters; they get the originals. Their states stay sharded.
    """
    originals = dict(originals)
    with as_stored(), torch.no_grad():
        for sharded, original in originals.items():
            assert isinstance(sharded, DTensor)
            full = sharded.full_tensor().cpu().clone()
            if original.is_meta:  # it cannot get values
                original = originals[sharded] = nn.Parameter(full)
            sources = vars(sharded).pop(KEPT, ())
            memories = (each.full for each in sources if isinstance(each, OutsideMemory))
            original.data = next((each.copy_(full) for each in memories if each.device == full.device), full)
            for source in sources:
                source.end(original)
            for given in vars(sharded).pop(GIVEN, ()):
                if isinstance(given, WholeDTensor):
                    KeptWeight.stands(given, original)
                elif isinstance(given, nn.Parameter):  # kept from a forward
                    given.data = original.data
            original.requires_grad_(sharded.requires_grad)
            if hasattr(original, "_fsdp_orig_uid"):
                del original._fsdp_orig_uid
        for child in module.modules():
            for name, param in list(child._parameters.items()):
                if param is not None and param in originals:
                    child._parameters[name] = originals[param]
    for optimizer in optimizers:
        _hand_over(optimizer, originals)
    for unit in units:
        _undo(unit)
    for child in module.modules():
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            child.__dict__.pop(mark, None)


def _hand_over(optimizer: Optimizer, originals: Mapping[Tensor, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [originals.get(param, param) for param in group["params"]]
    for sharded in list(optimizer.state):
        if sharded in originals:
            optimizer.state[originals[sharded]] = optimizer.state.pop(sharded)


def _undo(unit: Any) -> None:
    for handle in _handles(unit):
        handle.remove()
    unit.__class__ = type(unit).__mro__[FSDPModule._orig_cls_mro_index]
    for key in (STATE_KEY, REGISTRY_KEY):
        of_unit = unit.__dict__.get(key, {})
        for name in [name for name in of_unit if getattr(name, "__name__", name) == fully_shard.__name__]:
            del of_unit[name]
        if not of_unit:
            unit.__dict__.pop(key, None)
    _composable_state._module_state_mapping.pop(unit, None)
    remove(unit)
    for name in ("__deepcopy__", "__reduce_ex__"):
        unit.__dict__.pop(name, None)


def _handles(unit: Any) -> list[RemovableHandle]:
    """The handles of all hooks that ``fully_shard`` has set for a unit."""
    state = fully_shard.state(unit)  # type: ignore[attr-defined]
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in groups(unit):
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [param._post_load_hook_handle for param in group.fsdp_params]
    return handles


def unwrap_checkpointing(module: nn.Module) -> None:
    """Replace the wrappers of activation checkpointing by their modules."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, CheckpointWrapper) and not isinstance(parent, CheckpointWrapper):
                parent._modules[name] = child._checkpoint_wrapped_module


# -- copies -----------------------------------------------------------------------------------------------------------


def allow_copies(module: nn.Module) -> None:
    """Make copies and pickles of a unit ordinary modules with whole parameters; to copy or pickle is a collective."""
    install(module)
    for unit in units_of(module):
        unit.__dict__["__deepcopy__"] = partial(_deepcopy, unit)
        unit.__dict__["__reduce_ex__"] = partial(_reduce, unit)


def _reduce(unit: Any, protocol: Any) -> Any:
    cls = type(unit).__mro__[FSDPModule._orig_cls_mro_index]
    return copyreg._reconstructor, (cls, object, None), without_engine(vars(unit))  # type: ignore[attr-defined]


def _deepcopy(unit: Any, memo: dict[int, Any]) -> nn.Module:
    for group in groups(unit):
        group._to_sharded()
    hooks = {handle.id for handle in _handles(unit)}
    cls = type(unit).__mro__[FSDPModule._orig_cls_mro_index]
    twin: nn.Module = nn.Module.__new__(cls)
    memo[id(unit)] = twin
    for name, value in unit.__dict__.items():
        if name in (STATE_KEY, REGISTRY_KEY, "__deepcopy__", "__reduce_ex__", "__getstate__", "_apply"):
            continue
        if name.endswith("_hooks") and value:
            value = type(value)(
                (key, hook) for key, hook in value.items() if key not in hooks and not _is_internal(hook)
            )
        twin.__dict__[name] = copy.deepcopy(value, memo)
    return twin


def _is_internal(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", "").startswith(__name__.split(".")[0] + ".")


# -- conversions ------------------------------------------------------------------------------------------------------

# torch converts a parameter that is a DTensor by swapping it with a new one, even if nothing changes, and refuses to do
# so if there are references to either. The parameters that keep dtype and device are left out. The others keep what
# users and FSDP2 know of them. A unit with another dtype than it had is not gathered.


def allow_conversions(root: nn.Module) -> None:
    """Let ``root`` and its submodules be converted to what they are, and to other dtypes and back."""
    for module in root.modules():
        vars(module)["_apply"] = partial(_apply, module)  # looked up on the instance


def remove_conversions(root: nn.Module) -> None:
    """Undo :func:`allow_conversions`."""
    for module in root.modules():
        vars(module).pop("_apply", None)


class _Converted(dict[str, Any]):
    """A module's parameters, whose items are only those that torch shall convert."""

    left_out: frozenset[str]

    def items(self) -> Any:
        return {name: each for name, each in super().items() if name not in self.left_out}.items()


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    parameters: dict[str, Any] = module._parameters
    if isinstance(module, FSDPModule):
        module.reshard()  # registers the sharded parameters, as the class's method does
    else:
        _register_sharded(parameters.values(), fn)
    converted = _Converted(parameters)
    converted.left_out = frozenset(name for name, param in parameters.items() if _stays(param, fn))
    swapped = [
        (param, type(param), vars(param))
        for name, param in parameters.items()
        if isinstance(param, WholeDTensor) and param.link is not None and name not in converted.left_out
    ]
    module.__dict__["_parameters"] = converted
    try:
        MethodType(type(module)._apply, module)(fn, recurse=recurse)
    finally:
        parameters.update(module._parameters)
        module.__dict__["_parameters"] = parameters
        for param, own_class, attributes in swapped:  # torch has given them those of the new one
            param.__class__, param.__dict__ = own_class, attributes
    for param, *_ in swapped:
        _follow(param)
    return module


def _register_sharded(parameters: Iterable[Any], fn: Callable[[Tensor], Tensor]) -> None:
    for param in list(parameters):
        link: Any = param.link if isinstance(param, UnshardedParameter) else None
        is_whole = link is not None and param is link.unsharded
        if is_whole and not link.is_computing and not _keeps(param, fn):
            link.group._to_sharded()


def _follow(param: Any) -> None:
    """Let FSDP2 gather the new shards of a parameter, if they have the dtype of the memory into which it does."""
    group = param.link.group
    with torch.no_grad():
        for record in group.fsdp_params:
            if record.sharded_param is param:
                record.reset_sharded_param()
    others = [link for link in group.links if link.sharded.dtype != link.dtype]
    group.converted = None if not others else (others[0].dtype, others[0].sharded.dtype)


def _stays(param: Any, fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether ``fn`` leaves a sharded parameter as it is."""
    return isinstance(param, WholeDTensor) and _keeps(param, fn)


def _keeps(param: Tensor, fn: Callable[[Tensor], Tensor]) -> bool:
    with torch.no_grad():
        result = fn(torch.empty(0, dtype=param.dtype, device=param.device))
    return (result.dtype, result.device) == (param.dtype, param.device)
