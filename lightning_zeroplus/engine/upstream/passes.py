"""Upstream's forward and backward, without what they do for nothing, and under the autocast of their caller.

In each pass upstream's engine asks for profilers, timers, schedules, a compiler and accumulation steps, divides the
loss by 1 and multiplies it with 1, and at stage 3 tells every module twice that a forward runs. With many small layers
on a CPU that takes time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.utils import maybe_loss_for_backward, register_output_backward_hooks
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from deepspeed.utils import nvtx
from torch import Tensor, nn

from lightning_zeroplus.engine.upstream import probe
from lightning_zeroplus.gradients.patches.replacement import Replacement

_AS_IT_IS = nullcontext()
#: Upstream marks many functions for profilers, some for each parameter. On the CPU that does nothing, and takes 1.4 us.
_without_marks = Replacement(nvtx, "enable_nvtx", False)


class ShortPasses:
    """Mixin for an engine: its passes are short on the CPU, as long as its config asks for nothing more.

    On a GPU upstream's own passes run: they are marked for profilers, and kernels hide what they cost.
    """

    device: torch.device
    module: nn.Module
    optimizer: Any
    compilation: Any
    gradient_accumulation: Any
    _reading: Sequence[ZeROOrderedDict] = ()
    _unmarked: ExitStack
    _callers_dtype: torch.dtype | None = None
    _is_short: bool | None = None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._unmarked = ExitStack()
        if self.device.type == "cpu":
            self._unmarked.enter_context(_without_marks())
        weakref.finalize(self, self._unmarked.close).atexit = False

    def destroy(self) -> None:
        """Let upstream's functions be marked again."""
        super().destroy()  # type: ignore[misc]
        self._unmarked.close()

    def has_short_passes(self) -> bool:
        """Whether upstream's forward and backward would do nothing else."""
        if self._is_short is None:
            self._is_short = self.device.type == "cpu" and not any(self._asked_for())
        return self._is_short and self.compilation is None

    def _asked_for(self: Any) -> Iterator[Any]:
        yield not probe.has("passes that do what they always did")
        yield not self.managed_gradient_accumulation()
        yield self.gradient_accumulation_steps() != 1
        yield self.flops_profiler_enabled()  # also while autotuning
        yield self.memory_breakdown()
        yield self.engine_timers.active_timers()
        yield self.random_ltd_enabled()
        yield self.fp16_auto_cast()
        yield super().torch_autocast_enabled()  # type: ignore[misc]
        yield self.is_deepcompile_enabled()
        yield self.zenflow

    @property
    def _all_whole(self) -> Any:
        """At stage 3, what leaves modules without hooks while all weights are whole; None: at others."""
        return getattr(self.gradient_accumulation, "all_whole", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module under the autocast that the caller is in, as any module runs.

        Upstream's forward leaves autocast on a GPU, if its config has no section ``torch_autocast``. That section is
        more than a context: it also reduces gradients, and gathers weights, in 16 bits.
        """
        whole = self._all_whole
        if self.has_short_passes():
            if whole is not None:
                whole.begin()
            if isinstance(self.optimizer, ZeROOptimizer):
                self.optimizer.clear_backward_seen_flag()
            output = self.module(*args, **kwargs)
            register_output_backward_hooks(output, preprocess_once_fn=self._backward_prologue)  # type: ignore[attr-defined]
            return output
        if whole is not None:
            whole.end()
        kind = self.device.type
        if torch.is_autocast_enabled(kind) and not self.torch_autocast_enabled():
            self._callers_dtype = torch.get_autocast_dtype(kind)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._callers_dtype = None

    def torch_autocast_enabled(self) -> bool:
        """Whether upstream enters autocast in its forward."""
        return self._callers_dtype is not None or bool(super().torch_autocast_enabled())  # type: ignore[misc]

    def torch_autocast_dtype(self) -> torch.dtype:
        """In which dtype: the caller's."""
        configured: torch.dtype = super().torch_autocast_dtype()  # type: ignore[misc]
        return configured if self._callers_dtype is None else self._callers_dtype

    def _forward_prologue(self: Any, inputs: Any, kwargs: Any) -> Any:
        if not self.has_short_passes():
            return super()._forward_prologue(inputs, kwargs)  # type: ignore[misc]
        if self.training_dataloader is None:
            self.tput_timer.start()
        whole = self._all_whole
        if self.zero_optimization_partition_weights() and not (whole is not None and whole.is_on):
            self._reading = _parameters(self.module)
            for each in self._reading:
                each._in_forward = True  # upstream gathers what a module reads of another one
        return None

    def _forward_epilogue(self: Any) -> None:
        if not self.has_short_passes():
            super()._forward_epilogue()  # type: ignore[misc]
        elif self._reading:
            for each in self._reading:
                each._in_forward = False
            self._reading = ()

    def backward(self: Any, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """Differentiate a loss, which has its scale, if there is one."""
        scales = self.has_loss_scale() or getattr(self.optimizer, "custom_loss_scaler", False)
        if (
            scales
            or self._is_compiled_autograd_enabled
            or not (self.has_short_passes() and maybe_loss_for_backward(loss))
        ):
            return super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)  # type: ignore[misc]
        state = vars(self)  # a module looks among its parameters and buffers for what is set
        with self._running_engine_backward_lock:
            state["_running_engine_backward_count"] += 1
            state["_running_engine_backward"] = True
        try:
            loss.backward(retain_graph=retain_graph)
            self._backward_epilogue()
        finally:
            with self._running_engine_backward_lock:
                state["_running_engine_backward_count"] -= 1
                state["_running_engine_backward"] = state["_running_engine_backward_count"] > 0
        return loss

    def _backward_post_hook(self: Any) -> None:
        """End the user's own backward, unless the accumulation does, when all gradients of it have come."""
        if self.gradient_accumulation is None or not self.gradient_accumulation.ends_direct_backward:
            super()._backward_post_hook()  # type: ignore[misc]

    def backwards_nest(self: Any) -> AbstractContextManager[Any]:
        """Around a backward: what runs afterwards is the outer one, or none.

        Backwards nest, and one that raises may be caught. Older releases only know whether one runs.
        """
        if probe.has("nested and failing backwards"):
            return _AS_IT_IS
        end = ExitStack()
        end.callback(setattr, self, "_running_engine_backward", self._running_engine_backward)
        return end


def _parameters(root: nn.Module) -> list[ZeROOrderedDict]:
    """Where each module has its parameters. ``root.modules()`` also makes names, which take most of its time."""
    from deepspeed.runtime.zero.parameter_offload import ensure_zero_ordered_dict  # not in older releases

    found: list[Any] = []
    seen: set[nn.Module] = set()
    waiting: list[nn.Module | None] = [root]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in seen:
            seen.add(module)
            if not isinstance(module._parameters, ZeROOrderedDict):
                ensure_zero_ordered_dict(module)  # it was added in the fit
            found.append(module._parameters)
            waiting.extend(module._modules.values())
    return found
