"""Modules whose weights stay gathered at stage 3: what upstream does before and after each of their calls is left out.

Weights of at most ``stage3_param_persistence_threshold`` elements stay whole between two steps. Upstream's coordinator
asks for them, and offers to release them, at both ends of each forward and backward of their module. Here they are
asked for once, before a forward, and nobody releases them before the next step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import z3_leaf_module
from torch import nn

#: In the place of a module that uses a weight: it is not released by the others that share it.
RESIDENT = "stays"
THERE = ZeroParamStatus.AVAILABLE
_AS_IT_IS = nullcontext()


def stays(param: Any) -> bool:
    """Whether a weight stays gathered between two steps, and is nowhere else than on its ranks."""
    return bool(getattr(param, "ds_persist", False)) and param.nvme_swapper is None


def is_special(param: Any) -> bool:
    """Whether a gather of several parameters would read a quantized weight, or a second copy that is not updated."""
    return (
        hasattr(param.ds_tensor, "ds_quant_scale")
        or getattr(param, "ds_secondary_tensor", None) is not None
        or getattr(param, "ds_zero_param_process_group", None) is not None
    )


def is_there_after_steps(param: Any) -> bool:
    """Whether a weight stays, and a step may gather it together with others."""
    return stays(param) and not is_special(param)


def leave_alone(offload: Any, modules: Iterable[nn.Module]) -> None:
    """Remove the hooks of upstream's ``parameter_offload`` from modules for which nothing is gathered."""
    hooked = {id(hooks) for each in modules for hooks in (each._forward_pre_hooks, each._forward_hooks)}
    for handle in (*offload.forward_hooks, *offload.backward_hooks):
        if id(handle.hooks_dict_ref()) in hooked:
            handle.remove()


def has_nothing(module: nn.Module) -> bool:
    """Whether ``module`` has no parameters, and no modules that may have some."""
    return not module._modules and not own_parameters(module)


def passes_on(module: nn.Module) -> bool:
    """Whether ``module`` does nothing but call its children, and reads no weight itself."""
    return type(module).forward is nn.Sequential.forward and not own_parameters(module)


def stays_whole(module: nn.Module) -> bool:
    """Whether ``module`` has weights, no modules within, and nothing that is partitioned between two steps."""
    own = own_parameters(module)
    return (
        bool(own)
        and not module._modules
        and not vars(module).get("_external_params")
        and not z3_leaf_module(module)
        and all(map(stays, own))
    )


class Residents:
    """The modules whose weights stay.

    Args:
        modules: Those; upstream's hooks are removed from them.
        gather: Gathers weights, with all ranks that do so now, and waits for them.
    """

    def __init__(self, modules: Iterable[nn.Module], gather: Callable[[list[Any]], None]) -> None:
        self._modules, self._gather = list(modules), gather
        self._handles = [module.register_forward_pre_hook(self._before_forward) for module in self._modules]
        self._away: list[tuple[OrderedDict[int, Any], int, Any]] = []

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        (self._ask_uncompiled if torch.compiler.is_compiling() else self._ask)(module)

    def _ask(self, module: nn.Module) -> None:
        missing = False
        for param in module._parameters.values():
            users = getattr(param, "ds_active_sub_modules", None)  # None: from `torch.func.functional_call`
            if users is not None:
                users.add(RESIDENT)
                missing = missing or param.ds_status is not THERE  # type: ignore[union-attr]
        if missing:
            self._gather([param for param in own_parameters(module) if hasattr(param, "ds_id")])

    # Without it torch need not know of each call in a forward that is not compiled.
    _ask_uncompiled = torch.compiler.disable(_ask)

    def take_hooks_away(self) -> None:
        """Leave the modules without hooks: torch calls one that has none in a shorter way."""
        for handle in self._handles:
            hooks: Any = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                self._away.append((hooks, handle.id, hooks.pop(handle.id)))

    def put_hooks_back(self) -> None:
        """Undo :meth:`take_hooks_away`. Other hooks may need the weights: these come before them."""
        for hooks, number, hook in self._away:
            hooks[number] = hook
            hooks.move_to_end(number, last=False)
        self._away.clear()

    def remove(self) -> None:
        """Remove the hooks."""
        self._away.clear()
        for handle in self._handles:
            handle.remove()

    def close(self) -> None:
        """Remove the hooks, and what they have noted."""
        self.remove()
        for module in self._modules:
            for param in own_parameters(module):
                getattr(param, "ds_active_sub_modules", set()).discard(RESIDENT)


def own_parameters(module: nn.Module) -> list[Any]:
    """The parameters of ``module`` itself, without those of modules within."""
    return [param for param in module._parameters.values() if param is not None]


def in_trace(module: Any) -> tuple[int, ...]:
    """``ds_id`` of ``module``, and of the weights of others that it is known to read: the same on all ranks."""
    read = vars(module).get("_external_params", {}).values()  # whose keys are addresses
    return module.ds_id, *(getattr(param, "ds_id", -1) for param in read)


def has_others(module: nn.Module) -> bool:
    """Whether ``module`` has parameters that are not partitioned: those of ``torch.func.functional_call``."""
    for param in module._parameters.values():
        if param is not None and not hasattr(param, "ds_id"):
            return True
    return False


def without_others(module: nn.Module) -> AbstractContextManager[None]:
    """Within: ``module`` has its partitioned parameters only, without those of ``torch.func.functional_call``."""
    return _partitioned_only(module) if has_others(module) else _AS_IT_IS


@contextmanager
def _partitioned_only(module: nn.Module) -> Iterator[None]:
    params = module._parameters
    vars(module)["_parameters"] = {name: param for name, param in params.items() if hasattr(param, "ds_id")}
    try:
        yield
    finally:
        vars(module)["_parameters"] = params


def outside_inference() -> AbstractContextManager[Any]:
    """Within, weights are ordinary in inference mode, too: a graph may need next what upstream fetches ahead."""
    if not torch.is_inference_mode_enabled():
        return _AS_IT_IS
    found = ExitStack()
    found.enter_context(torch.inference_mode(False))
    found.enter_context(torch.no_grad())
    return found
