"""Stage 3 while all weights are whole: from one step to the next, if all of them stay gathered in between.

Upstream asks for weights at both ends of each forward and backward of each module, also where nothing is partitioned.
With small layers on a CPU that is a good part of a forward's time. Until a weight is released, modules are called as
they would be without ZeRO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK, ZeROOrderedDict
from deepspeed.utils import z3_leaf_module
from torch import nn

from lightning_zeroplus.engine.gathering.containers import WatchedParameters, WholeParameters
from lightning_zeroplus.engine.gathering.resident import RESIDENT, THERE, Residents, is_there_after_steps
from lightning_zeroplus.internals.compiled import has_compiled
from lightning_zeroplus.weights.partitioned.access import WatchedParameter


class AllWhole:
    """Lets upstream's hooks, and those of resident modules, do nothing while all weights are whole.

    Args:
        modules: All modules of the engine; the first is the root, which upstream's stack of running modules always has.
        params: Their parameters.
        residents: The modules that stay whole.
        offload: Upstream's ``parameter_offload``, with the handles of its hooks.

    Attributes:
        is_on: All weights are whole, and the hooks do nothing.
    """

    def __init__(self, modules: list[nn.Module], params: list[Any], residents: Residents, offload: Any) -> None:
        self._modules, self._params, self._residents, self._offload = modules, params, residents, offload
        self.is_on = self._steps = False
        start: Any = getattr(offload, "fwd_pre_hook", None)
        self._may_begin = bool(params) and start is not None and all(map(is_there_after_steps, params))
        self._may_begin = self._may_begin and not any(map(z3_leaf_module, modules))
        self._is_told = False
        if self._may_begin:
            pairs = {handle.id for handle in offload.forward_hooks}
            others = {start.id, *(handle.id for handle in offload.backward_hooks)}
            for module in modules:
                before, after = module._forward_pre_hooks, module._forward_hooks
                for number in (pairs | others) & before.keys():
                    before[number] = self._unless_on(before[number])
                for number in others & after.keys():
                    after[number] = self._unless_on(after[number])
                for number in pairs & after.keys():
                    after[number] = self._if_begun(after[number])
        offload.forward_hooks.append(residents)  # whose hooks upstream removes where it runs without any

    def begin(self) -> None:
        """Before a forward of the root: begin, if all weights are whole, and nothing is compiled, which keeps hooks."""
        if self.is_on or not self._may_begin:
            return
        if not self._is_told:
            self._is_told = self._may_begin = all(isinstance(param, WatchedParameter) for param in self._params)
            for param in self._params if self._may_begin else ():
                param._zeroplus_released = self._released
        if self._may_begin and self._are_whole() and not has_compiled():
            self._residents.take_hooks_away()
            self._change_dicts(WatchedParameters, WholeParameters)
            self.is_on = True

    def end(self) -> None:
        """Let the hooks gather again."""
        if self.is_on:
            self.is_on = False
            self._residents.put_hooks_back()
            self._change_dicts(WholeParameters, WatchedParameters)

    def _change_dicts(self, before: type, after: type[ZeROOrderedDict]) -> None:
        for module in self._modules:
            if type(module._parameters) is before:
                module._parameters.__class__ = after

    def _released(self) -> None:
        if not self._steps:
            self.end()

    def _are_whole(self) -> bool:
        """Whether all weights are whole; nobody releases them then before the next step."""
        for param in self._params:
            if param.ds_status is not THERE:
                return False
            param.ds_active_sub_modules.add(RESIDENT)
        return True

    @property
    def is_stepping(self) -> bool:
        """Whether a step runs through which weights may stay whole, if they are updated in place."""
        return self.is_on and self._steps

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around upstream's step, which may release the weights, and gathers them again after the update."""
        self._steps = True
        try:
            yield
        except BaseException:
            if self.is_on:
                self.end()
                self._offload.release_all()  # some partitions may be updated
            raise
        finally:
            self._steps = False
            if self.is_on and not self._are_whole():
                self.end()

    def close(self) -> None:
        """End for good."""
        self.end()
        self._residents.close()
        self._may_begin = False
        for param in self._params:
            vars(param).pop("_zeroplus_released", None)

    def _unless_on(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def unless_all_are_whole(*args: Any) -> Any:
            return hook(*args) if torch.compiler.is_compiling() or not self.is_on else None

        return unless_all_are_whole

    def _if_begun(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """After a forward: do what belongs to what was done before it."""

        def if_begun(module: nn.Module, args: Any, output: Any) -> Any:
            begun = torch.compiler.is_compiling() or FWD_MODULE_STACK.count(module) > (module is self._modules[0])
            return hook(module, args, output) if begun else None

        return if_begun
