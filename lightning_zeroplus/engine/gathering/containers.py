"""Stage 3 and tensors in containers: upstream's hooks look for tensors in tuples, lists and dicts.

Before a forward they give the module copies of its lists, and put other tensors into its dicts. After it, they gather
weights for the backward of each tensor that they find in the output. Here a module may write to what it is called with,
and tensors in objects are found, also those that it has written.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from lightning_zeroplus.internals.containers import Calls, hidden_tensors

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

try:
    from deepspeed.compile.z3_eager_fallback import get_active_z3_eager_fallback as _active_fallback
except ImportError:  # older releases

    def _active_fallback() -> Any:
        return None


_DICTS = (dict, OrderedDict, defaultdict)
_WHOLE = ZeroParamStatus.AVAILABLE


class SeesContainers:
    """Takes the place of upstream's hooks.

    Args:
        modules: The modules.
        forward: The handles of upstream's hooks that gather and release around forwards.
        backward: Those of the hooks that find tensors, to do the same around backwards.
    """

    def __init__(
        self, modules: Iterable[nn.Module], forward: Iterable[RemovableHandle], backward: Iterable[RemovableHandle]
    ) -> None:
        self._calls: defaultdict[int, Calls] = defaultdict(Calls)
        of_forwards, of_backwards = ({handle.id for handle in handles} for handles in (forward, backward))
        for module in modules:
            if type(module._parameters) is ZeROOrderedDict:
                module._parameters.__class__ = WatchedParameters
            before, after = module._forward_pre_hooks, module._forward_hooks
            for number in of_backwards & before.keys():
                before[number] = self._before(before[number])
                module._forward_pre_hooks_with_kwargs[number] = True
            for number in of_backwards & after.keys():
                after[number] = self._after(after[number])
            for number in of_forwards & after.keys():
                after[number] = _with_any_output(after[number])

    def _before(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @torch.compiler.disable
        def before_forward(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            given = upstream(module, _with_own_dicts(args)), kwargs
            self._calls[id(module)].begin((args, kwargs), given)
            return given

        return before_forward

    def _after(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @torch.compiler.disable
        def after_forward(module: Any, args: Any, output: Any) -> Any:
            written = self._calls[id(module)].end(args)
            if torch.is_grad_enabled():
                for tensor in (*hidden_tensors(output), *written):
                    _gather_for_backward(module, tensor)
            seen = upstream(module, args, output)
            if type(output) is list:
                output[:] = seen
                return output
            return seen

        return after_forward


class WatchedParameters(ZeROOrderedDict):
    """A module's parameters, whose copy is an ordinary dict.

    Upstream's cannot be copied. Libraries for meta-learning call ``module._parameters.copy()``.
    """

    def __getitem__(self, key: str) -> Any:
        """A parameter. Upstream asks for more, each time, also where it is whole and no graph is compiled."""
        param: Any = OrderedDict.__getitem__(self, key)
        is_whole = not torch.compiler.is_compiling() and getattr(param, "ds_status", None) is _WHOLE
        return param if is_whole and _active_fallback() is None else super().__getitem__(key)

    def copy(self) -> Any:
        return OrderedDict(self.items())


class WholeParameters(WatchedParameters):
    """The same while all weights are whole."""

    __getitem__: Any = OrderedDict.__getitem__


def _gather_for_backward(module: Any, tensor: Tensor) -> None:
    """Do what upstream's function does in a backward, which is called with a tensor and gives another one."""
    if tensor.requires_grad:
        context: Any = SimpleNamespace()
        if "setup_context" in vars(module.pre_bwd_fn):
            module.pre_bwd_fn.setup_context(context, (tensor,), tensor)
        else:  # older releases
            module.pre_bwd_fn.forward(context, tensor)
        tensor.register_hook(lambda _: context.pre_backward_function(context.module))


def _with_any_output(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
        known = output is None or isinstance(output, list | tuple | dict | Tensor) or hasattr(output, "__dict__")
        return upstream(module, args, output if known else None)  # not of a generator, for example

    return after_forward


def _with_own_dicts(value: Any) -> Any:
    """Copies of the dicts, into which upstream writes."""
    if isinstance(value, tuple | list) and any(isinstance(each, dict | tuple | list) for each in value):
        copies = [_with_own_dicts(each) for each in value]
        return type(value)(*copies) if hasattr(value, "_fields") else type(value)(copies)
    if type(value) in _DICTS:
        copy = value.copy()
        for key, each in value.items():
            if isinstance(each, dict | tuple | list):
                copy[key] = _with_own_dicts(each)
        return copy
    return value
