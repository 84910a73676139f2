"""From the shards of a DTensor to the whole tensor, and back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_zeroplus.gradients.patches.transforms import outside_transforms

#: Within it tensors are what they are stored as: no operation is looked at, ``param.grad`` is the tensor's own.
as_stored = torch._C.DisableTorchFunctionSubclass


def gather(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, detached, in memory of its own; by all ranks of its mesh."""
    link = getattr(tensor, "link", None)
    return gather_now(tensor) if link is None else link.gather(tensor)


@outside_transforms()
def gather_now(tensor: Tensor) -> Tensor:
    """As :func:`gather`; all ranks are here."""
    with as_stored(), torch.no_grad():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.clone() if full is tensor or same_memory(full, tensor) else full


def scatter(full: Tensor, like: DTensor) -> DTensor:
    """The DTensor with the layout of ``like`` whose whole is ``full``, which every rank has; without a collective."""
    mesh = like.device_mesh
    full = full.detach().to(device=like.device, dtype=like.dtype).expand(like.shape).contiguous()
    replicated = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)


def store(full: Tensor, target: DTensor) -> None:
    """Let ``target`` have the value ``full``, which every rank has; without a collective."""
    with as_stored(), torch.no_grad():
        target._local_tensor.copy_(scatter(full, target)._local_tensor)


def same_memory(first: Tensor, second: Tensor) -> bool:
    """Whether a tensor is in the memory of another one, or of its shard."""
    local = second._local_tensor if isinstance(second, DTensor) else second
    return first.untyped_storage().data_ptr() == local.untyped_storage().data_ptr() != 0
