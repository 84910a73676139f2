"""Make copies and pickles of a module that an engine trains ordinary modules, without the engine's attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

_OURS = "lightning_zeroplus."
_ENGINES = ("deepspeed.", _OURS, "torch.distributed.fsdp.")
#: Attributes that an engine sets on modules, besides those named ``ds_...``.
_UPSTREAMS = frozenset(
    (
        "_external_params",
        "_original_parameters",
        "all_parameters",
        "applied_pre_backward_ref_cnt",
        "__deepcopy__",
        "__getstate__",
        "__reduce_ex__",
    )
)
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


#: Attributes that DeepSpeed sets on parameters, besides functions and those named ``ds_...``.
_ON_PARAMETERS = frozenset(
    (
        "_dp_group",
        "_hp_mapping",
        "_index_in_param_group",
        "_z3_optimizer",
        "_zero_optimizer",
        "grad_accum",
        "is_external_param",
        "nvme_swapper",
        "param_idx_in_group",
    )
)


def install(root: nn.Module) -> None:
    """Let copies and pickles of ``root``, its submodules and its parameters be ordinary."""
    # Looked up on the instance by copy and pickle, whatever the class defines.
    for module in root.modules():
        vars(module)["__getstate__"] = partial(ordinary_state, module)
    for param in root.parameters():
        if type(param).__reduce_ex__ is nn.Parameter.__reduce_ex__:
            vars(param)["__reduce_ex__"] = partial(_reduce_parameter, param)


def remove(root: nn.Module) -> None:
    """Undo :func:`install`."""
    for module in root.modules():
        vars(module).pop("__getstate__", None)
    for param in root.parameters():
        vars(param).pop("__reduce_ex__", None)


def own_class(param: Tensor) -> Any:
    """The class that the user has made the parameter of."""
    classes = type(param).__mro__
    return next(cls for cls in classes if not any(each.__module__.startswith(_OURS) for each in cls.__mro__))


def _reduce_parameter(param: nn.Parameter, protocol: Any) -> Any:
    ordinary = own_class(param)(param.data, param.requires_grad)
    for name, value in vars(param).items():
        if name != "_shown_gradient" and not is_engines_on_parameter(name, value):
            setattr(ordinary, name, value)
    return ordinary.__reduce_ex__(protocol)


def is_engines_on_parameter(name: str, value: Any) -> bool:
    """Whether an attribute of a parameter is an engine's."""
    return name.startswith(("ds_", "_zeroplus_", "_ds_")) or name in _ON_PARAMETERS or from_engine(value)


def ordinary_state(module: nn.Module) -> Any:
    """The result of the class's ``__getstate__()`` without hooks and attributes of an engine."""
    of_class: Callable[[nn.Module], Any] | None = getattr(type(module), "__getstate__", None)
    state = of_class(module) if of_class is not None else vars(module)
    return without_engine(state) if isinstance(state, dict) else state


def without_engine(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a module's ``__dict__`` without hooks and attributes of an engine."""
    kept = {key: value for key, value in state.items() if not _is_engines(key, value)}
    if "_parameters" in kept:
        kept["_parameters"] = dict(kept["_parameters"])
    for name in _HOOKS:
        if name in kept:
            hooks = type(kept[name])((key, hook) for key, hook in kept[name].items() if not from_engine(hook))
            dropped = kept[name].keys() - hooks.keys()
            kept[name] = hooks
            for flags in _HOOK_FLAGS:
                if dropped and flags in kept:
                    kept[flags] = type(kept[flags])(
                        (key, flag) for key, flag in kept[flags].items() if key not in dropped
                    )
    return kept


def _is_engines(key: str, value: Any) -> bool:
    return (
        key in _UPSTREAMS or key.startswith(("ds_", "__composable_api")) or (key not in _HOOKS and from_engine(value))
    )


def from_engine(value: Any) -> bool:
    """Whether a function, method or class is DeepSpeed's, FSDP2's or ours."""
    while (inside := _inside(value)) is not None:
        value = inside
    inner: Iterable[Any] = (value, getattr(value, "__wrapped__", None))
    return callable(value) and any(
        str(getattr(each, "__module__", "")).startswith(_ENGINES) and not isinstance(each, nn.Module) for each in inner
    )


def _inside(value: Any) -> Any:
    if isinstance(value, partial):
        return value.func
    if isinstance(value, MethodType):
        return value.__func__
    return getattr(value, "hook", None) if type(value).__name__ == "_WrappedHook" else None
