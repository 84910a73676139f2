"""DeepSpeed's own compiled ZeRO-3 on CPU: its engine, its fallback for skipped frames, its sum of gradients.

``deepspeed.initialize`` and ``engine.compile`` are upstream's, unchanged. What needs CUDA and NCCL, the native
extension of DeepCompile, is a port to Python: :class:`StockHandle`, after ``deepspeed/ops/csrc/compile/z3.cpp`` and
``includes/deepcompile.h`` of DeepSpeed 0.19.8. It has what decides on gradients and on memory: a flag per graph and
parameter, ``has_acc_grad_``, which says whether to add to the rank's partition or to overwrite it, and which the end of
the graph's own backward clears. Streams, buckets and symmetric memory are left out: they change when something happens,
not what.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.compile import backend as upstream_backend
from deepspeed.compile import util
from deepspeed.compile.passes.zero3_compile import add_z3_gather_release
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._inductor.scheduler import Scheduler
from torch._subclasses import FakeTensorMode

from lightning_zeroplus.engine.compile import cpu_backend
from lightning_zeroplus.engine.compile.meter import GatherMeter
from lightning_zeroplus.engine.compile.patches import Patches
from lightning_zeroplus.engine.compile.profiling import cpu_profiling


class _Graph:
    """``Z3CustomOpExecutor``: a compiled graph's gradients of this backward, and which of them have a sum to add to."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.has_acc_grad = dict.fromkeys(ids, False)
        self.tasks: list[tuple[int, Tensor]] = []
        self.param_updated = False


class StockHandle(cpu_backend.CpuHandle):
    """The native extension's sum of gradients: reduced per graph, into the partitions that the optimizer reads."""

    def __init__(self, meter: GatherMeter) -> None:
        super().__init__(_not_ours, meter)
        self._graphs: dict[int, _Graph] = {}
        self._buffers: dict[int, tuple[Tensor, Any]] = {}

    def register_z3_param(
        self, id: int, shape: Iterable[int], shard: Tensor, grad: Tensor, persistent: bool, grad_dtype: Any
    ) -> None:
        super().register_z3_param(id, shape, shard, grad, persistent, grad_dtype)
        grad.zero_()
        self._buffers[id] = grad, grad_dtype

    def update_param_grad_buffer(self, id: int, grad: Tensor, offset: int) -> None:
        grad.zero_()
        self._buffers[id] = grad, self._buffers[id][1]

    def register_graph_z3(self, graph_id: int, ids: list[int]) -> None:
        self._graphs[graph_id] = _Graph(ids)

    def reset(self) -> None:
        super().reset()
        self._graphs.clear()

    def start_backward(self, update: bool) -> None:
        for graph in self._graphs.values():
            graph.param_updated = update

    def reduce_grad(self, a: Tensor, graph_id: int, id: int) -> Tensor:
        if not self._profiling:
            _, dtype = self._buffers[id]
            self._graphs[graph_id].tasks.append((id, a.detach() if dtype is None else a.detach().to(dtype)))
        return a.new_empty(0)

    def end_backward(self, deps: Any, graph_id: int, release_reduce_buckets: bool) -> None:
        graph = self._graphs[graph_id]
        rank, world = dist.get_rank(group=self._group), dist.get_world_size(group=self._group)
        for id, grad in graph.tasks:
            buffer, _ = self._buffers[id]
            full = grad.new_zeros(buffer.numel() * world)  # padded as the partitions are
            full[: math.prod(grad.shape)] = grad.reshape(-1) / world
            dist.all_reduce(full, group=self._group)
            part = full.view(world, -1)[rank].to(buffer.dtype)
            if graph.has_acc_grad[id]:
                buffer.add_(part)
            else:
                buffer.copy_(part)
            graph.has_acc_grad[id] = True
        graph.tasks.clear()
        if graph.param_updated:
            for id in graph.has_acc_grad:
                graph.has_acc_grad[id] = False
                self.invalidate_gathered_param(id)


def _not_ours(id: int, grad: Tensor) -> None:
    raise AssertionError("a gradient has gone to our reduction")


@contextmanager
def stock_engine(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Iterator[Any]:
    """DeepSpeed's engine, compiled with ``backend="eager"`` and the gather and release pass alone.

    Whatever DeepSpeed and this function change in the process is undone at the end. One engine at a time may be
    compiled, and not one of ours beside it.

    Args:
        model: The module to train.
        optimizer: Over its trainable parameters.
        config: A complete DeepSpeed config with stage 3.

    Yields:
        The engine; its attribute ``meter`` is a :class:`GatherMeter` of compiled and skipped frames.
    """
    patches = Patches()
    _protect_process(patches)
    _port_to_cpu(patches)
    meter = GatherMeter()
    util.dc_handle = StockHandle(meter)
    cpu_backend.use(util.dc_handle)
    patches.call_later(partial(cpu_backend.use, None))
    engine = None
    try:
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config={**config, "compile": {"deepcompile": True}}
        )
        engine.compile(backend="eager", schedule=[(0, [add_z3_gather_release])])
        engine.meter = meter
        _count(engine._deepcompile_z3_eager_fallback, meter)
        yield engine
    finally:
        if engine is not None:
            engine.destroy()
            model._compiled_call_impl = None
        patches.undo()
        torch._dynamo.reset()


def _count(fallback: Any, meter: GatherMeter) -> None:
    record: Callable[[Any], None] = fallback.record_gathered_param

    def record_and_count(param: Any) -> None:
        record(param)
        meter.gathered(param.data)

    fallback.record_gathered_param = record_and_count


def _protect_process(patches: Patches) -> None:
    """Remember what upstream's set-up replaces in the process and never puts back."""
    patches.keep(torch._dynamo.variables.builder, "wrap_to_fake_tensor_and_record")
    patches.keep(GuardBuilder, "TENSOR_MATCH")
    patches.keep(FakeTensorMode, "from_tensor")
    patches.keep(Scheduler, "dead_node_elimination")
    patches.keep(Scheduler, "is_dc_patched")
    patches.keep(deepspeed.utils.nvtx, "enable_nvtx")
    patches.keep(util, "dc_handle")
    patches.keep(torch.nn.functional, "linear")
    for hooks in (util.pre_backward_hooks, util.post_backward_hooks):
        patches.call_later(partial(hooks.__setitem__, slice(None), list(hooks)))
    for config, name in ((torch._inductor.config, "size_asserts"), (torch._functorch.config, "donated_buffer")):
        patches.call_later(partial(setattr, config, name, getattr(config, name)))


def _port_to_cpu(patches: Patches) -> None:
    """What upstream's Python needs, beside the handle, to run without CUDA at all."""
    run = upstream_backend.run_opt_passes

    def run_opt_passes(*args: Any, **kwargs: Any) -> None:
        with cpu_profiling():
            run(*args, **kwargs)

    patches.replace(upstream_backend, "run_opt_passes", run_opt_passes)
    patches.replace(upstream_backend, "log_rank0", _log)
    # Collects garbage around every pass, which frees memory of a device; here it takes most of the time and frees none.
    patches.replace(upstream_backend, "gc", SimpleNamespace(collect=int))
    patches.replace(torch.Tensor, "record_stream", lambda tensor, stream: None)  # zero_grad calls it with no stream
    # Else Dynamo captures it when a skipped frame calls it, and upstream's fallback, which asks is_compiling(), never
    # runs: torch.nn.Linear fails with the empty parameter that it gets.
    code = ZeROOrderedDict.__getitem__.__code__
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    default = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)
    patches.call_later(partial(set_code_exec_strategy, code, default))


def _log(message: str, enable: bool = True) -> None:
    logging.getLogger(__name__).debug(message)
