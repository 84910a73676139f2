"""Choose the modules that become units, and shard them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fully_shard as torch_wrap
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_zeroplus.fsdp.beside import find_beside, set_aside
from lightning_zeroplus.fsdp.scalars import as_vectors
from lightning_zeroplus.gradients.patches.specialize import subclass_for_instances
from lightning_zeroplus.weights.errors import check_not_scripted

#: The modules that become units: modules of these classes, modules with at least so many elements of parameters outside
#: of units below them, or modules for which the function returns True.
WrapPolicy = type[nn.Module] | Iterable[type[nn.Module]] | int | Callable[[nn.Module], bool]


def make_predicate(policy: WrapPolicy | None, name: str) -> Callable[[nn.Module], bool] | None:
    """Make a function of a module from classes or a function; None for a size or None.

    Args:
        policy: See :data:`WrapPolicy`.
        name: The name of the argument, for the message.

    Raises:
        ValueError: If ``policy`` is none of these.
    """
    if policy is None or (isinstance(policy, int) and not isinstance(policy, bool) and policy > 0):
        return None
    if isinstance(policy, type):
        policy = (policy,)
    elif not isinstance(policy, Iterable) and callable(policy):
        return policy
    classes = tuple(policy) if isinstance(policy, Iterable) else ()
    if not classes or not all(isinstance(each, type) and issubclass(each, nn.Module) for each in classes):
        raise ValueError(
            f"`{name}={policy!r}`: give module classes, a positive number of parameters, or a function of a module."
        )
    return lambda module: isinstance(module, classes)


def shard_children(module: nn.Module, policy: WrapPolicy | None, mesh: DeviceMesh, **kwargs: Any) -> list[nn.Module]:
    """Apply ``fully_shard`` to the children of ``module``, and within them to what ``policy`` chooses.

    It is never applied to ``module`` itself, which is used by other methods than ``forward()``: nothing is gathered for
    them. Containers without a ``forward()`` are replaced by their children, and so are metrics.

    Args:
        module: The module.
        policy: See :data:`WrapPolicy`; None: one unit per child.
        mesh: The mesh over which to shard.
        **kwargs: Passed to ``fully_shard``.

    Returns:
        Units that are not below the module: for parameters of no child, or of several.

    Raises:
        ValueError: If a trainable parameter cannot be in a unit; nothing is sharded.
    """
    check_not_scripted(module)
    beside = find_beside(module, _callable_children(module))
    _check_casts(module, kwargs.get("mp_policy"))
    with set_aside(beside):
        units = _units(module, policy)
        _check_dtypes(module, [unit for root, inner in units for unit in (*inner, root)])
        for root, inner in units:
            own = _keep_statistics_in_fp32(root, mesh=mesh, **kwargs)
            for unit in (*inner, root):
                if unit not in own:
                    own.add(unit)
                    _shard(unit, mesh, **_in_full_precision(unit, kwargs))
    for each in beside:
        _shard(each, mesh, **_in_full_precision(each, kwargs | {"mp_policy": _plain(kwargs.get("mp_policy"))}))
        each.share()
    return list(beside)


def _units(module: nn.Module, policy: WrapPolicy | None) -> list[tuple[nn.Module, list[nn.Module]]]:
    """The children that become units, each with the units within it, innermost first."""
    roots = _callable_children(module)
    return [(root, [*_of_another_dtype(root), *_choose(root, policy)]) for root in roots]


def planned_units(module: nn.Module, policy: WrapPolicy | None) -> list[tuple[list[nn.Parameter], bool]]:
    """The units that :func:`shard_children` would make; nothing is sharded.

    Args:
        module: The module; its parameters may be on the meta device.
        policy: See :data:`WrapPolicy`.

    Returns:
        The parameters of each unit, in the order of the module. True: the unit is a root, which stays gathered between
        its forward and its backward.

    Raises:
        ValueError: If a trainable parameter cannot be in a unit.
    """
    units = _units(module, policy)
    _check_dtypes(module, [unit for root, inner in units for unit in (*inner, root)])
    homes: dict[nn.Parameter, int] = {}
    for root, _ in units:
        for param in root.parameters():
            homes[param] = homes.get(param, 0) + 1
    beside = [param for param in module.parameters() if homes.get(param, 0) != 1]
    found: list[tuple[list[nn.Parameter], bool]] = []
    taken = set(beside)
    for root, inner in units:
        for unit in dict.fromkeys((*inner, root)):
            own = [param for param in unit.parameters() if param not in taken]
            taken.update(own)
            found.append((own, unit is root))
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for param in beside:
        by_dtype.setdefault(param.dtype, []).append(param)
    found += [(params, True) for params in by_dtype.values()]
    return [(params, is_root) for params, is_root in found if params]


def _shard(unit: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> None:
    policy = kwargs.get("mp_policy")
    if policy is not None and policy.reduce_dtype is None and policy.param_dtype is not None:
        # The dtype of computation: from torch 2.15 on None is the parameter's own.
        kwargs["mp_policy"] = replace(policy, reduce_dtype=policy.param_dtype)
    known, cls = torch_wrap.get_cls_to_fsdp_cls(), type(unit)
    if cls not in known and not isinstance(unit, FSDPModule):
        name, methods = f"FSDP{cls.__name__}", {"__deepcopy__": torch_wrap._unimplemented_deepcopy, "__new__": _new}
        made = subclass_for_instances(FSDPModule, cls, name, **methods)
        known[cls] = type(name, (FSDPModule, cls), methods) if made is None else made  # torch's would not fit
    with as_vectors([unit], mesh):
        fully_shard(unit, mesh=mesh, **kwargs)


def _new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """An instance of a unit's class is one of the original class, as in torch; but one of a subclass is its own."""
    if cls in torch_wrap.get_cls_to_fsdp_cls().values():
        original = cls.__mro__[FSDPModule._orig_cls_mro_index]
        if not (args or kwargs) and _needs_arguments(original):
            return original.__new__(original)  # `module.__new__(type(module))`, which runs no `__init__`
        return FSDPModule.__new__(cls, *args, **kwargs)
    made: Any = super(FSDPModule, cls).__new__(cls)
    vars(made)["_apply"] = super(FSDPModule, made)._apply  # the class's own wants a unit
    return made


def _needs_arguments(cls: Any) -> bool:
    try:
        signature(cls.__init__).bind(None)
    except TypeError:
        return True
    return False


def _plain(policy: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    """The policy of a unit that computes in its own dtype."""
    return MixedPrecisionPolicy(None, policy.reduce_dtype if policy else None, cast_forward_inputs=False)


def _of_another_dtype(root: nn.Module) -> list[nn.Module]:
    """The modules whose parameters have another dtype than the root's unit: FSDP2 cannot reduce them together.

    That unit has the dtype of the root's own parameters, or that of most parameters below it.
    """
    own = [param.dtype for param in root.parameters(recurse=False) if param.requires_grad]
    dtypes = own or [param.dtype for param in root.parameters() if param.requires_grad]
    common = max(dtypes, key=dtypes.count, default=None)
    return [
        child
        for child in root.modules()
        if child is not root
        and _can_be_unit(child)
        and any(param.requires_grad and param.dtype != common for param in child.parameters(recurse=False))
    ]


def _in_full_precision(unit: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``fully_shard``, changed to reduce gradients of float64 and complex dtypes as they are."""
    policy = kwargs.get("mp_policy")
    dtypes = {param.dtype for param in unit.parameters() if param.requires_grad}
    wide = next((dtype for dtype in dtypes if dtype == torch.float64 or dtype.is_complex), None)
    if policy is None or policy.reduce_dtype is None or policy.param_dtype is not None or wide is None:
        return kwargs
    return {**kwargs, "mp_policy": MixedPrecisionPolicy(None, wide)}


def _keep_statistics_in_fp32(root: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> set[nn.Module]:
    """Make each ``BatchNorm`` a unit that computes in its own dtype, as under autocast; return these units."""
    policy = kwargs.get("mp_policy")
    if policy is None or policy.param_dtype is None:
        return set()
    found: set[nn.Module] = {child for child in root.modules() if isinstance(child, _BatchNorm) and child.affine}
    for child in found:
        _shard(child, mesh, **{**kwargs, "mp_policy": _plain(policy)})
    return found


def _check_casts(module: nn.Module, policy: MixedPrecisionPolicy | None) -> None:
    if policy is None or policy.param_dtype is None:
        return
    for name, param in module.named_parameters():
        if param.requires_grad and param.is_complex():
            raise ValueError(
                f"The parameter {name!r} is of {param.dtype}, and FSDP2 would cast it to {policy.param_dtype}, without"
                " its imaginary part. Use `precision='32-true'`, or train it as two real parameters"
                " (`torch.view_as_complex` in forward())."
            )


def _check_dtypes(module: nn.Module, units: list[nn.Module]) -> None:
    names = {id(param): name for name, param in module.named_parameters()}
    taken: set[int] = set()
    for unit in units:  # innermost first
        own = [param for param in unit.parameters() if id(param) not in taken]
        taken.update(id(param) for param in own)
        trainable = [param for param in own if param.requires_grad]
        for param in trainable:
            if param.dtype != trainable[0].dtype:
                raise ValueError(
                    f"The parameters {names[id(trainable[0])]!r} and {names[id(param)]!r} of one unit are of"
                    f" {trainable[0].dtype} and {param.dtype}, and FSDP2 reduces them together. Give each dtype a"
                    " module of its own, and name its class in `wrap`."
                )


def _callable_children(module: nn.Module) -> list[nn.Module]:
    found: dict[nn.Module, None] = {}
    for child in module.children():
        if isinstance(child, OptimizedModule):
            child = child._orig_mod  # the wrapper calls it
        if next(child.parameters(), None) is None:
            continue
        if _can_be_unit(child):
            found[child] = None
        else:
            found.update(dict.fromkeys(_callable_children(child)))
    return list(found)


def _can_be_unit(module: nn.Module) -> bool:
    """Whether ``module`` is called, and torch finds it again: the hash of torchmetrics' classes changes in a fit."""
    cls = type(module)
    return cls.forward is not nn.Module.forward and cls.__hash__ is nn.Module.__hash__


def _choose(root: nn.Module, policy: WrapPolicy | None) -> list[nn.Module]:
    """The units strictly within ``root``, innermost first."""
    predicate = make_predicate(policy, "wrap")
    counts: dict[int, int] = {}
    for submodule in root.modules():
        for param in submodule.parameters(recurse=False):
            counts[id(param)] = counts.get(id(param), 0) + 1
    chosen: list[nn.Module] = []
    taken: set[int] = set()
    seen: set[nn.Module] = {root}

    def visit(parent: nn.Module) -> None:
        for child in parent.children():
            if child in seen:
                continue
            seen.add(child)
            inner = child
            if isinstance(child, CheckpointWrapper):
                inner = child._checkpoint_wrapped_module  # gather around the recomputation, not within it
                seen.add(inner)
            visit(inner)
            free = {id(p): p.numel() for p in child.parameters() if id(p) not in taken}
            if not free or not _can_be_unit(inner):
                continue
            if predicate(inner) if predicate else isinstance(policy, int) and sum(free.values()) >= policy:
                # A module with a parameter that is also used outside stays in the unit around both.
                if not _shared_outside(child, counts):
                    chosen.append(child)
                    taken.update(free)

    visit(root)
    return chosen


def _shared_outside(module: nn.Module, counts: dict[int, int]) -> bool:
    inside: dict[int, int] = {}
    for submodule in module.modules():
        for param in submodule.parameters(recurse=False):
            inside[id(param)] = inside.get(id(param), 0) + 1
    return any(counts[key] > count for key, count in inside.items())
