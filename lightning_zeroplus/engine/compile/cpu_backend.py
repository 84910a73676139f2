"""The operators and the handle of DeepCompile's native extension, in Python, for process groups on CPU.

The native extension needs CUDA and NCCL. The compiled graphs need little of it: all-gather a parameter, release it
after its last use, and take a gradient. On either backend, gradients go to the engine's own reduction: see
:mod:`.session`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor
from torch.library import Library

from lightning_zeroplus.engine.compile.meter import GatherMeter

_SCHEMAS = (
    "allgather_param(Tensor a, int graph_id, int id, ScalarType? dtype = None) -> Tensor",
    "prefetch_params_fused(int graph_id, Tensor[] params, int[] ids, ScalarType[]? dtypes = None) -> ()",
    "wait_allgather(Tensor(a) a, int graph_id, int id) -> Tensor(a)",
    "release_param(Tensor(a) a, int graph_id, int id, int n_users) -> Tensor(a)",
    "reduce_grad(Tensor a, int graph_id, int id) -> Tensor",
    "free_tensors(Tensor[] a) -> ()",
    "end_backward(Any deps, int graph_id, bool release_reduce_buckets) -> ()",
    # Upstream's lowerings name these; no schedule that is accepted on CPU uses them.
    "offload_tensor(Tensor a, int graph_id, int id) -> Tensor",
    "reload_tensor(Tensor a, int graph_id, int id) -> Tensor",
    "wait_offload(Tensor a, int graph_id, int id) -> Tensor",
    "wait_reload(Tensor a, int graph_id, int id) -> Tensor",
    "offload_parameter(Tensor a, int graph_id, int id) -> ()",
    "reload_parameter(Tensor a, int graph_id, int id) -> ()",
)


class CpuHandle:
    """The handle of ``deepspeed.compile``: keeps registered parameters, and the gathered ones.

    Args:
        receive: Takes the id of a parameter and a full gradient, of one graph in this backward.
        meter: Counts gathered bytes.
    """

    def __init__(self, receive: Callable[[int, Tensor], None], meter: GatherMeter) -> None:
        self._receive = receive
        self._meter = meter
        self._group: Any = None
        self._params: dict[int, tuple[torch.Size, Tensor]] = {}
        self._gathered: dict[int, Tensor] = {}
        self._persistent: set[int] = set()
        self._users: dict[tuple[int, int], int] = {}
        self._profiling = False

    # -- what upstream's Python calls -----------------------------------------------------------------------------

    def init(self, process_group: Any, config: Any, bucket_size: int) -> None:
        """Set the process group."""
        self._group = process_group

    def cleanup(self) -> None:
        """Forget graphs, parameters and what is gathered."""
        self.reset()
        self._params.clear()
        self._gathered.clear()
        self._persistent.clear()
        self._profiling = False

    def reset(self) -> None:
        """Forget the graphs: they will be compiled anew."""
        self._users.clear()

    def enable_profiling(self, enable: bool) -> None:
        """Say whether a graph is being profiled: its gradients are not real then."""
        self._profiling = enable

    def is_profiling(self) -> bool:
        """Whether a graph is being profiled."""
        return self._profiling

    def start_forward(self) -> None:
        """Do nothing."""

    def end_forward(self) -> None:
        """Do nothing."""

    def start_backward(self, update: bool) -> None:
        """Do nothing: the engine accumulates."""

    def register_param(self, id: int, shape: Iterable[int], param: Tensor, grad: Tensor, offset: int) -> None:
        """Register a parameter at stages 1 and 2, which is never gathered."""
        self._params[id] = (torch.Size(shape), param)

    def update_param_grad_buffer(self, id: int, grad: Tensor, offset: int) -> None:
        """Do nothing: gradients go to the engine."""

    def register_z3_param(
        self, id: int, shape: Iterable[int], shard: Tensor, grad: Tensor, persistent: bool, grad_dtype: Any
    ) -> None:
        """Register a parameter at stage 3; ``shard`` is this rank's partition."""
        self._params[id] = (torch.Size(shape), shard)

    def register_graph_z1(self, graph_id: int, ids: list[int]) -> None:
        """Do nothing: a graph has no state of its own."""

    register_graph_z2 = register_graph_z3 = register_graph_z1

    def set_persistent(self, id: int) -> None:
        """Keep a parameter gathered until :meth:`invalidate`, although graphs release it."""
        self._persistent.add(id)

    def invalidate_gathered_param(self, id: int) -> None:
        """Drop the gathered parameter."""
        self._gathered.pop(id, None)

    def clear_all_gathered_params(self) -> None:
        """Drop all gathered parameters, and their counts of uses."""
        self._gathered.clear()
        self._users.clear()

    invalidate = clear_all_gathered_params

    # -- the operators --------------------------------------------------------------------------------------------

    def allgather_param(self, a: Tensor, graph_id: int, id: int, dtype: torch.dtype | None = None) -> Tensor:
        """The full parameter; gathers it unless it is gathered."""
        if id not in self._gathered:
            self._gather([id], dtype)
        shape, _ = self._params[id]
        full = self._gathered[id][: math.prod(shape)].view(shape)
        return full if dtype is None else full.to(dtype)

    def prefetch_params_fused(
        self, graph_id: int, params: list[Tensor], ids: list[int], dtypes: list[torch.dtype] | None = None
    ) -> None:
        """Gather several parameters in one collective per dtype."""
        wanted: dict[torch.dtype, list[int]] = {}
        for id, dtype in zip(ids, dtypes or [self._params[id][1].dtype for id in ids], strict=True):
            if id not in self._gathered:
                wanted.setdefault(dtype, []).append(id)
        for dtype, members in wanted.items():
            self._gather(members, dtype)

    def _gather(self, ids: list[int], dtype: torch.dtype | None) -> None:
        shards = [self._params[id][1].detach().reshape(-1) for id in ids]
        shards = [shard if dtype is None else shard.to(dtype) for shard in shards]
        world = dist.get_world_size(group=self._group)
        send = shards[0].contiguous() if len(shards) == 1 else torch.cat(shards)
        received = torch.empty(world * send.numel(), dtype=send.dtype)
        dist.all_gather_into_tensor(received, send, group=self._group)
        if len(ids) == 1:
            buffers = [received]
        else:
            sizes = [shard.numel() for shard in shards]
            columns = received.view(world, -1).split(sizes, dim=1)
            buffers = [column.reshape(-1) for column in columns]  # copies, because each is released by itself
        self._gathered.update(zip(ids, buffers, strict=True))
        self._meter.gathered(*buffers)

    def wait_allgather(self, a: Tensor, graph_id: int, id: int) -> Tensor:
        """Do nothing: gathers are done when they return."""
        return a

    def release_param(self, a: Tensor, graph_id: int, id: int, n_users: int) -> Tensor:
        """Note that one of ``n_users`` uses in a graph is over; after the last one, release the memory."""
        key = (graph_id, id)
        self._users[key] = self._users.get(key, n_users) - 1
        if self._users[key] == 0:
            del self._users[key]
            if id not in self._persistent:
                buffer = self._gathered.pop(id, None)
                if buffer is not None:
                    # Unused views of it may live on in the graph.
                    buffer.untyped_storage().resize_(0)
                    self._meter.freed(buffer)
        return a

    def reduce_grad(self, a: Tensor, graph_id: int, id: int) -> Tensor:
        """Hand a gradient to the engine, unless the graph is being profiled."""
        if not self._profiling:
            self._receive(id, a)
        return a.new_empty(0)

    def end_backward(self, deps: Any, graph_id: int, release_reduce_buckets: bool) -> None:
        """Do nothing: the engine ends a backward."""

    def free_tensors(self, a: list[Tensor]) -> None:
        """Do nothing: memory is freed with its last reference."""

    def full_shape(self, id: int) -> tuple[torch.Size, torch.dtype]:
        """The full shape and the dtype of a parameter."""
        shape, tensor = self._params[id]
        return shape, tensor.dtype


_current: CpuHandle | None = None
_library: Library | None = None


def use(handle: CpuHandle | None) -> None:
    """Let the ``dc`` operators call ``handle``. They are registered once per process: torch keeps references."""
    global _current, _library
    if _library is None and handle is not None:
        _library = _register()
    _current = handle


def available() -> bool:
    """Whether the ``dc`` operators are this module's, or nobody has registered others."""
    return _library is not None or not hasattr(torch.ops.dc, "allgather_param")


def _register() -> Library:
    library = Library("dc", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
        name = schema.partition("(")[0]
        key = "CompositeExplicitAutograd" if name == "end_backward" else "CPU"
        library.impl(name, _forwarded(name) if hasattr(CpuHandle, name) else _refuse, key)
        if name != "end_backward":
            library.impl(name, _META.get(name, lambda a, *args: a), "Meta")
    return library


def _forwarded(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        assert _current is not None, "no compiled engine is open"
        return getattr(_current, name)(*args, **kwargs)

    return call


def _refuse(*args: Any) -> Any:
    raise RuntimeError("DeepCompile's offloading passes need the native extension, and so CUDA.")


def _full_like(a: Tensor, graph_id: int, id: int, dtype: torch.dtype | None = None) -> Tensor:
    assert _current is not None
    shape, own = _current.full_shape(id)
    return torch.empty(shape, dtype=dtype or own, device="meta")


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


_META: dict[str, Callable[..., Any]] = {
    "allgather_param": _full_like,
    "prefetch_params_fused": _nothing,
    "reduce_grad": lambda a, graph_id, id: a.new_empty(0),
    "free_tensors": _nothing,
    "offload_parameter": _nothing,
    "reload_parameter": _nothing,
}
