"""Parameters without dimensions under FSDP2, which shards the first dimension."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate

from lightning_zeroplus.fsdp.late_grads import parameters
from lightning_zeroplus.gradients.patches.specialize import specialize


class ReplicatedScalar(FSDPParam):
    """Mixin for FSDP2's record of a parameter, bound at run time: every rank has the one element.

    FSDP2 shards a vector with one equal element per rank. Each rank keeps one element of the vector, and gets one
    element of its gradient. The optimizer, forwards and backwards see a scalar.
    """

    def _get_grad_inner_tensor(self, grad: Tensor) -> Tensor:
        return super()._get_grad_inner_tensor(grad).repeat(self.shard_mesh.size())

    def reset_sharded_param(self) -> None:
        registered: Any = getattr(self._module_info.module, self._module_info.param_name)
        self.sharded_param = registered
        _lay_out(self, registered._spec)
        local = registered._local_tensor
        if local.is_meta:
            return
        if self.pin_memory and not local.is_pinned():
            local = registered._local_tensor = local.pin_memory()
        self._sharded_param_data = local.view(1)


def _lay_out(record: Any, spec: Any) -> None:
    record._sharding_spec = spec
    getattr(record, "_sharding_spec_by_dtype", {}).clear()  # torch 2.15 keeps copies of the layout before


def agree(scalars: Sequence[ReplicatedScalar]) -> None:
    """Give all ranks the same gradients of scalars, to the bit; a collective, after their reduction.

    Each rank has its own element of the reduced vector, and each element may be summed in another order.
    """
    grads: list[Any] = [scalar.sharded_param.grad for scalar in scalars if scalar.sharded_param.grad is not None]
    if grads:
        first = torch.stack([grad._local_tensor.double() for grad in grads])
        dist.broadcast(first, group=scalars[0].shard_mesh.get_group(), group_src=0)
        for grad, value in zip(grads, first, strict=True):
            grad._local_tensor.copy_(value)


@contextmanager
def as_vectors(units: Iterable[nn.Module], mesh: DeviceMesh) -> Iterator[None]:
    """Let ``fully_shard`` of ``units`` within accept scalars; their records become :class:`ReplicatedScalar`.

    Args:
        units: The modules that are sharded within.
        mesh: The mesh over whose last dimension they are sharded.
    """
    modules = list(dict.fromkeys(child for unit in units for child in unit.modules()))
    places = [
        (module, name, param)
        for module in modules
        for name, param in module._parameters.items()
        if param is not None and param.ndim == 0 and not isinstance(param, DTensor)  # not a nested unit's
    ]
    vectors: dict[int, nn.Parameter] = {}
    for module, name, param in places:
        if id(param) not in vectors:
            ranks = mesh.size(mesh.ndim - 1)
            vectors[id(param)] = nn.Parameter(param.detach().repeat(ranks), param.requires_grad)
        module._parameters[name] = vectors[id(param)]
    try:
        yield
        scalars = {(module, name) for module, name, _ in places}
        for unit in units:
            for record in parameters(unit):  # type: ignore[arg-type]
                if (record._module_info.module, record._module_info.param_name) in scalars:
                    _make_scalar(record)
    finally:
        for module, name, param in places:
            if module._parameters[name] is vectors[id(param)]:  # `fully_shard` has raised
                module._parameters[name] = param


def _make_scalar(record: Any) -> None:
    specialize(record, ReplicatedScalar)
    record._orig_size = record.sharded_size = torch.Size(())
    record._contiguous_orig_stride = record.contiguous_sharded_stride = ()
    local, mesh = record._sharded_param_data.view(()), record._spmd_mesh
    _lay_out(record, DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)._spec)
    record.sharded_param = nn.Parameter(record.to_sharded_dtensor(local), record.sharded_param.requires_grad)
    record._setattr_on_modules(record.sharded_param)
