"""The next step starts from the weights that the user sees.

Upstream's optimizers keep fp32 master weights and copy them to the module after each step: what the user wrote to the
module's weights in between is lost. In fp32 the master weights share the module's memory, and nothing is copied. If
dtype or device differ, a weight that is not its rounded master weight was written by the user: the master weight takes
its value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor, nn

from lightning_zeroplus.weights.holders import held_weights, holders
from lightning_zeroplus.weights.overlaps import check_apart

#: How many weights are compared at once, which takes 9 bytes each: on the CPU what its cache holds, on a GPU what
#: makes few kernels.
_AT_ONCE, _AT_ONCE_ON_DEVICE = 2**16, 2**24


def share_memory(master: Tensor, weights: Tensor) -> bool:
    """Give master weights the memory of the module's weights, if dtype, device and size are the same.

    Args:
        master: The flat tensor that the optimizer updates.
        weights: A flat view of the module's weights.

    Returns:
        Whether they share memory.
    """
    if master.dtype != weights.dtype or master.device != weights.device or master.numel() != weights.numel():
        return False
    if master.data_ptr() != weights.data_ptr():
        master.data = weights.detach().view(master.shape)
    return True


@torch.no_grad()
def take_over(master: Tensor, weights: Tensor) -> None:
    """Replace, in place, the master weights whose rounded value is not the module's weight.

    Args:
        master: The master weights: any shape, fp32.
        weights: The module's weights: as many elements, any float dtype.
    """
    there = weights.detach().view(master.shape)
    parts = [(master, there)]
    if master.is_contiguous() and there.is_contiguous():
        at_once = _AT_ONCE if master.device.type == there.device.type == "cpu" else _AT_ONCE_ON_DEVICE
        parts = list(zip(master.view(-1).split(at_once), there.view(-1).split(at_once), strict=True))
    for mine, given in parts:
        written = given.to(mine.device)
        mine.copy_(torch.where(written != mine.to(written.dtype), written.to(mine.dtype), mine))


def note_masters(optimizer: Any, params: Iterable[Any], anew: bool) -> None:
    """Let upstream's notes of where each parameter's master weights are be right, and no part of a graph.

    Upstream flattens the parameter for that. A graph keeps its leaves, which Python's garbage collector does not see:
    the parameters, with their module and engine, would live as long as the process.

    Args:
        optimizer: Upstream's optimizer of stage 1 or 2.
        params: Its parameters.
        anew: The master weights are not where they were: upstream would keep their first memory, and its
            ``safe_get_full_fp32_param`` would read that.
    """
    if anew:
        optimizer._link_all_hp_params()
    for param in params:
        note = param._hp_mapping  # None: other ranks own it
        if note is not None:
            note.lp_fragment, note.hp_fragment = note.lp_fragment.detach(), note.hp_fragment.detach()


class Homes:
    """The place of each parameter in a flat buffer, which ``param.data = other`` leaves.

    For a step or a checkpoint the parameter is brought back. Afterwards it gets ``other`` again: the user may go on
    with that tensor, as under DDP.

    Args:
        params: Parameters that are views of flat buffers.
        names: The parameters' names, for messages.
    """

    def __init__(self, params: Iterable[nn.Parameter], names: Iterable[str]) -> None:
        self._homes = [(name, param, param.data, param.data_ptr()) for name, param in zip(names, params, strict=True)]
        self._outside: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        #: By address of a flat buffer, how many tensors have its memory while no user has any.
        self.holders: dict[int, int] = {}

    def note_holders(self) -> None:
        """Note how many tensors have the memory of the flat buffers, all of them the engine's, as it has been built."""
        flat = {home.untyped_storage().data_ptr(): home for _, _, home, _ in self._homes}
        self.holders = {address: holders(home) for address, home in flat.items()}

    def bring_back(self) -> None:
        """Copy what was assigned to ``param.data`` into the flat buffer, and make the parameter a view of it again.

        Raises:
            RuntimeError: If a parameter has another shape or dtype than when the fit began, or the memory of another;
                no weight was updated.
        """
        self._outside, assigned = [], []
        for name, param, home, address in self._homes:
            if param.data_ptr() == address and param.stride() == home.stride():
                continue
            if param.shape != home.shape or param.dtype != home.dtype:
                raise RuntimeError(
                    f"`param.data` of {name!r} was assigned a {param.dtype} tensor of shape {tuple(param.shape)}; it"
                    f" was {home.dtype} of shape {tuple(home.shape)} when the fit began. ZeRO has one buffer for all"
                    " weights: keep shape and dtype, or change them before the fit."
                )
            assigned.append((param, param.data, home))
        if not assigned:
            return
        check_apart((name, param.data) for name, param, _, _ in self._homes)
        with torch.no_grad():
            _copy_all([(home, data) for _, data, home in assigned])
        for param, _, home in assigned:
            param.data = home
        self._outside = assigned

    @torch.no_grad()
    def follow(self) -> None:
        """Give the parameters that were brought back their assigned memory again, with their current values."""
        _copy_all([(outside, home) for _, outside, home in self._outside])
        for param, outside, _ in self._outside:
            param.data = outside
        self._outside = []


def _copy_all(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy to each first tensor the second, as if all at once: memory may be exchanged, or turned by ``data.T``."""
    listed = list(copies)
    written = {target.untyped_storage().data_ptr() for target, _ in listed}
    values = [each.clone() if each.untyped_storage().data_ptr() in written else each for _, each in listed]
    for (target, _), value in zip(listed, values, strict=True):
        target.copy_(value)


class FollowsModule:
    """The part of a gradient accumulation that handles weights written by the user."""

    engine: Any
    optimizer: Any
    params: list[nn.Parameter]
    _homes = Homes((), ())  # no weight is in a flat buffer

    def find_held(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The weights whose memory a user's tensors have, and that memory: the optimizer is about to be built anew.

        The weights in one flat buffer are held together: its memory tells only how many tensors have some of it.
        """
        return held_weights(self.engine.module, self._homes.holders)

    @torch.no_grad()
    def hold(self, held: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Give weights the memory back that they had before upstream took them: other tensors have it, too."""
        for param, memory in held:
            if param.data_ptr() != memory.data_ptr() and param.dtype == memory.dtype and param.device == memory.device:
                memory.copy_(param.data)
                param.data = memory
        self._homes.note_holders()

    def take_written_weights(self) -> None:
        """Before a step: copy weights that the user has written to the optimizer."""

    def follow_weights(self) -> None:
        """After a step: copy updated weights to parameters that lie outside of the optimizer's memory."""

    def count_update(self, indices: Iterable[int]) -> None:
        """After a step: let autograd refuse a backward of what was computed with the weights before, as under DDP.

        Args:
            indices: Of the parameters that have a gradient.
        """
        if not (self.engine.skips_steps() and getattr(self.optimizer, "overflow", False)):
            torch.autograd.graph.increment_version([self.params[index] for index in indices])

    @contextmanager
    def written_weights(self) -> Iterator[None]:
        """Give the optimizer the weights that the user has written, within."""
        with torch.no_grad():
            self.take_written_weights()
        yield
        self.follow_weights()


def with_masters(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters of ``FP16_Optimizer`` or ``FP16_UnfusedOptimizer``, each with its fp32 master weights."""
    for group, params in enumerate(optimizer.fp16_groups):
        if isinstance(optimizer, FP16_UnfusedOptimizer):
            yield from zip(params, optimizer.fp32_groups[group], strict=True)
        else:
            masters = optimizer.fp32_groups_flat[group].split([param.numel() for param in params])
            yield from ((param, master.view_as(param)) for param, master in zip(params, masters, strict=True))


def with_master_gradients(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
    """As :func:`with_masters`, with the gradients of the master weights, as far as they are there."""
    for group, params in enumerate(optimizer.fp16_groups):
        if isinstance(optimizer, FP16_UnfusedOptimizer):
            yield from zip(params, (master.grad for master in optimizer.fp32_groups[group]), strict=True)
        elif (flat := optimizer.fp32_groups_flat[group].grad) is not None:
            yield from zip(params, flat.split([param.numel() for param in params]), strict=True)
