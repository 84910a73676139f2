"""Conversions between the shards of a DTensor and the whole tensor, and the whole tensors that users have views of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_zeroplus.gradients.dtype import check_assigned
from lightning_zeroplus.gradients.patches.transforms import outside_transforms

#: Within, tensors are plain DTensors: no operation is intercepted, and ``param.grad`` is the stored attribute.
as_stored = torch._C.DisableTorchFunctionSubclass
#: Attributes of a sharded parameter, from the end of the fit until the module is whole: what users have views of, and
#: the tensors that they got by ``param.data`` or ``param.detach()``.
KEPT, GIVEN = "_kept_sources", "_given_tensors"
#: An attribute of a parameter that is about to be sharded: its memory, tensors of users that have some of it, and
#: whether others than torch have it.
BEFORE = "_kept_before"
_INTERNAL = ("lightning_zeroplus.", "torch.distributed.")


def is_users(frame: FrameType | None) -> bool:
    """Whether a frame that called into this folder runs code of users, and not of FSDP2 or this package."""
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(__package__):
        frame = frame.f_back
    return frame is not None and not str(frame.f_globals.get("__name__", "")).startswith(_INTERNAL)


def gather(tensor: Tensor) -> Tensor:
    """The whole tensor of a DTensor, detached, in new memory; all ranks of its mesh must call it."""
    link = getattr(tensor, "link", None)
    return gather_now(tensor) if link is None else link.gather(tensor)


@outside_transforms()
def gather_now(tensor: Tensor) -> Tensor:
    """As :func:`gather`, if all ranks are known to call it."""
    with as_stored(), torch.no_grad():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.clone() if full is tensor or same_memory(full, tensor) else full


def shard_like(tensor: Tensor, local: Tensor) -> DTensor:
    """``local`` as this rank's shard of a DTensor that is laid out as ``tensor``."""
    spec = tensor._spec  # type: ignore[attr-defined]
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def scatter(full: Tensor, like: DTensor) -> DTensor:
    """Shard ``full``, which every rank has, in the layout and dtype of ``like``; no collective."""
    mesh = like.device_mesh
    full = full.detach().to(device=like.device, dtype=like.dtype).expand(like.shape).contiguous()
    replicated = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)


def store(full: Tensor, target: DTensor) -> None:
    """Write ``full``, which every rank has, to the shards of ``target``; no collective."""
    with as_stored(), torch.no_grad():
        target._local_tensor.copy_(scatter(full, target)._local_tensor)
        if (link := getattr(target, "link", None)) is not None:
            link.stored(full)


def same_memory(first: Tensor, second: Tensor) -> bool:
    """Whether ``first`` shares the memory of ``second``, or of its shard."""
    local = second._local_tensor if isinstance(second, DTensor) else second
    return first.untyped_storage().data_ptr() == local.untyped_storage().data_ptr() != 0


def fitting(grad: Tensor, param: DTensor) -> DTensor:
    """Convert a gradient to the layout of its parameter."""
    check_assigned(grad, param)
    if not isinstance(grad, DTensor):
        return scatter(grad, param)
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return grad


class Source:
    """A weight, and the whole tensor that was gathered from it, of which users have views.

    Args:
        tensor: The sharded tensor, a :class:`~.tensor.WholeDTensor`.
        full: The whole one.
    """

    def __init__(self, tensor: Any, full: Tensor) -> None:
        self.tensor, self.full = tensor, full.detach()
        self._weight: Any = None
        self._bytes = full.untyped_storage().nbytes()
        self._seen = self._now()

    @property
    def link(self) -> Any:
        """That of the weight; None: there is none, or the fit has ended."""
        return getattr(self.tensor, "link", None)

    def weight(self) -> Tensor:
        """The sharded tensor; after the fit the whole weight, or a :class:`~.tensor.WholeDTensor` in the next fit."""
        if self.tensor is not None:
            return self.tensor
        with _as_users_call():
            return self._weight.detach()

    def _now(self) -> Any:
        link = self.link
        return self.tensor._local_tensor._version if link is None else link.changes

    def refresh(self) -> None:
        """Gather again if the weight has changed since, for example by a step; a collective then.

        FSDP2 frees the memory of an unsharded weight, and takes the same again when it gathers next.
        """
        if self.tensor is None:
            with _as_users_call():
                self.full.copy_(self.weight())
            return
        if self.link is not None:
            self.link.settle()
        if self._is_freed() or self._seen != self._now():
            self._take(gather(self.tensor))
            self._seen = self._now()

    def has(self, result: Any) -> bool:
        """Whether a tensor has the whole tensor's memory."""
        return isinstance(result, Tensor) and same_memory(result, self.full)

    def _is_freed(self) -> bool:
        return self.full.untyped_storage().nbytes() < self._bytes

    def _take(self, now: Tensor) -> None:
        if not self._is_freed():
            self.full.copy_(now)
            return
        with torch.autograd._unsafe_preserve_version_counter(self.full):  # as where FSDP2 gathers
            self.full.untyped_storage().resize_(self._bytes)
            self.full.copy_(now)

    def store(self) -> None:
        """Write the whole tensor to the weight."""
        if self.tensor is None:
            with _as_users_call():
                self.weight().copy_(self.full)
            return
        store(self.full, self.tensor)
        self._seen = self._now()

    def end(self, weight: Tensor) -> None:
        """After the fit: the tensors that users have follow the whole weight, which may be sharded again."""
        self._take(weight.detach())
        self.tensor, self._weight = None, weight


@contextmanager
def _as_users_call() -> Iterator[None]:
    """Within :data:`as_stored`: operations are intercepted again."""
    with torch._C._EnableTorchFunction(), torch.no_grad():
        yield


def at_address(entry: Any) -> Tensor:
    """The whole tensor of an entry of a ``state_dict()``, at an address of its own as long as the entry lives.

    One rank may ask for it alone. Entries of a tied weight have one address, by which savers find ties: they may copy
    all entries but the first then.

    Args:
        entry: A :class:`~.tensor.WholeDTensor` that is no parameter.
    """
    kept = vars(entry).get("_read") or (entry.link and entry.link.read)
    if kept is None:
        kept = Source(entry, gather(entry))
    else:
        kept.refresh()
    entry._read, entry.is_read = kept, True
    if entry.link is not None:
        entry.link.note_read(kept)
    full: Tensor = kept.full
    return full


def as_real(tensor: DTensor) -> DTensor:
    """A view: that of DTensor is none if the shards have different sizes, and what is written to it is lost."""
    local, stride = torch.view_as_real(tensor.to_local()), (*(2 * step for step in tensor.stride()), 1)
    shape = torch.Size((*tensor.shape, 2))
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)
