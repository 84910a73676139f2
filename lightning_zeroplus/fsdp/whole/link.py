"""One parameter of a unit: its shards, the unsharded parameter that forwards use, and what users do to both."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zeroplus.fsdp.whole.aliases import Aliases, AssignedGradient, OutsideMemory, outside
from lightning_zeroplus.fsdp.whole.layout import BEFORE, GIVEN, KEPT, Source, as_stored, is_users, scatter
from lightning_zeroplus.fsdp.whole.sides import (
    GatheredParameter,
    ShardedParameter,
    ShownWeight,
    UnitSide,
    UnshardedParameter,
)
from lightning_zeroplus.fsdp.whole.tensor import WholeDTensor, WholeView, view_as_whole
from lightning_zeroplus.gradients.tasks import refuse_earlier_average
from lightning_zeroplus.weights.partitioned.alike import in_form
from lightning_zeroplus.weights.partitioned.copies import own_class

if TYPE_CHECKING:
    from lightning_zeroplus.fsdp.in_step import UnitsInStep


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_DATA: Any = Tensor.data


class Gradients(Protocol):
    """Knows when gradients are reduced."""

    #: Whether the backward that runs adds to what an earlier one is to have averaged.
    follows: bool
    #: The collectives of the units, in which all ranks take part.
    in_step: UnitsInStep

    def is_left(self, is_reached: bool) -> bool:
        """Whether a unit's gradients are left for the end of a window; ``is_reached``: a backward runs through it."""

    def before_access(self) -> None:
        """Prepare for a user's access to a reduced gradient."""

    def drop_local(self, param: Tensor, set_to_none: bool) -> bool:
        """Drop this rank's own gradient of a sharded parameter, after ``no_sync()``; whether it is after that."""

    def complete(self, what: str) -> None:
        """Make the gradients ready for ``what``, which follows."""

    def note_assigned(self, assigned: AssignedGradient) -> None:
        """Refuse what would not change a gradient as under DDP."""

    def meet(self) -> bool:
        """Wait for all ranks, and take part in what another one still gathers or reduces."""

    def changed(self, params: Iterable[Tensor]) -> None:
        """Note that a backward has reached a unit with these parameters."""

    def note_hooked(self, link: Link) -> None:
        """Note that a user may have a hook that runs after a gradient of this parameter was accumulated."""


class Link:
    """The sharded and the unsharded form of a parameter; FSDP2 registers one of them at a time with the module.

    Args:
        sharded: The parameter that the optimizer has.
        unsharded: The parameter that forwards use and backwards reach.
        holder: The parameter before it was sharded, or a stand-in: it holds the parameter's hooks.
        group: FSDP2's group of the unit.
        number: The parameter's number among the parameters of all units.
        gradients: Is told before ``grad`` is accessed.
    """

    def __init__(
        self,
        sharded: DTensor,
        unsharded: nn.Parameter,
        holder: Tensor,
        group: UnitSide,
        number: int,
        gradients: Gradients,
    ) -> None:
        self.sharded = sharded
        self.unsharded = unsharded
        self.holder = holder
        self.group = group
        self.number = number
        self.touched = False
        self.aliases = Aliases(sharded, WholeView.become)
        self.shown: ShownWeight | None = None
        self._read: weakref.ref[Source] | None = None
        self._gradients = gradients
        self._version = unsharded._version
        self._writes = 0
        self._hooks: list[Any] = []
        self._reached: Any = None
        self._required_grad, self.dtype = unsharded.requires_grad, sharded.dtype
        view_as_whole(sharded, self, shared=True)
        self.own_class = own_class(holder)
        sharded.__class__ = in_form(WholeDTensor, self.own_class)
        unsharded.__class__ = in_form(UnshardedParameter, self.own_class)
        unsharded.link = self  # type: ignore[attr-defined]
        memory, kept, is_outside = vars(holder).pop(BEFORE, (None, (), False))
        for tensor in kept:
            self.aliases.add(WholeView.become(tensor, Source(sharded, memory)))
        if is_outside:
            outside.note(OutsideMemory(sharded, memory))
        if self.has_accumulated_hooks:
            gradients.note_hooked(self)
        vars(sharded).update(vars(unsharded))
        vars(sharded)["serve_others"] = gradients.meet
        unsharded.__dict__ = sharded.__dict__  # what users set on either, such as `param.no_weight_decay`

    # -- users ------------------------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> nn.Parameter | None:
        """In a backward, the parameter that autograd accumulates in: under DDP users see this rank's own gradient."""
        with as_stored():  # while the unit is sharded, what waits from before is there, too
            is_there = self.group.is_unsharded or self.unsharded.grad is not None
        return self.unsharded if is_there and torch._C._current_graph_task_id() != -1 else None

    def register(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Register a hook of the kind that ``name`` says."""
        handle = getattr(self.holder, name)(*args, **kwargs)
        if self.has_accumulated_hooks:
            self._gradients.note_hooked(self)
        if self.is_computing:
            self._watch_gradient()
        return handle

    @property
    def has_accumulated_hooks(self) -> bool:
        """Whether there is a hook that runs after a gradient was accumulated."""
        return bool(self._held("_post_accumulate_grad_hooks"))

    def accumulated(self, grad: Tensor | None) -> Tensor | None:
        """In a backward, what the parameter has accumulated on this rank; ``grad`` is what autograd has.

        Raises:
            RuntimeError: If earlier gradients are averaged.
        """
        with as_stored():
            is_partial = self.sharded.grad is not None or grad is not None and self._gradients.follows
            if is_partial and (self.group.in_pass or not self.group.is_unsharded):
                refuse_earlier_average()
        return grad

    def before_grad(self, reader: FrameType | None = None, drops: bool = False) -> None:
        """Make ``grad`` what DDP would show.

        Args:
            reader: Who reads it; ``zero_grad()`` only asks whether there is one.
            drops: It is set to None.

        Raises:
            RuntimeError: Within a backward, if it is not what this rank has accumulated.
        """
        if torch._C._current_graph_task_id() != -1:
            with as_stored():  # what the running backward is done with is an average
                if self.sharded.grad is not None and is_users(reader):
                    refuse_earlier_average()
            return
        zeroes = reader is not None and reader.f_code.co_name == "zero_grad"
        to_none = drops or reader is None or reader.f_locals.get("set_to_none", True)
        if not ((drops or zeroes) and self._gradients.drop_local(self.sharded, to_none)):
            self._gradients.before_access()

    def was_set(self, attribute: str | None, value: Any) -> None:
        """After an assignment to an attribute: note a whole gradient, follow ``requires_grad``."""
        if attribute == "requires_grad":
            self.follow_requires_grad()
        elif attribute == "grad" and isinstance(value, Tensor) and not isinstance(value, DTensor):
            self._gradients.note_assigned(AssignedGradient(value, self.sharded))

    @property
    def changes(self) -> object:
        """The writes to the shards: by steps, which autograd counts, and by tensors that share their memory."""
        if self.shown is not None:
            return object()  # nothing counts the writes to the copy's data
        return self.sharded._local_tensor._version, self._writes

    def before_write(self, is_counted: bool = False) -> None:
        """Before the shards change: shard the unit, so that no forward uses what was gathered before.

        If autograd counts the change, it refuses a backward of what was computed before, as under DDP.
        """
        self._writes += 1
        self.group.in_step.note_write(together=self.shown is not None)
        if self.group.is_unsharded and (not self.is_computing or (is_counted and self.group.is_only_taken)):
            self.group._to_sharded()
        self.group.give_back()
        if is_counted and not self.is_computing:
            torch.autograd.graph.increment_version(self.unsharded)

    @property
    def read(self) -> Source | None:
        """What :func:`.at_address` has given for an entry of a ``state_dict()`` that is still there."""
        return None if self._read is None else self._read()

    def note_read(self, source: Source) -> None:
        """Note what :func:`.at_address` gives."""
        self._read = weakref.ref(source)

    def settle(self) -> None:
        """Copy what was written to a whole form of the parameter to the shards."""
        if self.shown is not None:
            self.shown.write()
        if self.group.is_unsharded:
            self.write_back()

    @property
    def is_computing(self) -> bool:
        """Whether a forward, a backward, an evaluation step, or a graph that stays has the unsharded parameter."""
        return self.group.is_unsharded and (self.group.in_pass or self.group.keep or self.group.is_taken)

    def stored(self, full: Tensor) -> None:
        """After ``full`` was written to the shards: write it to the copy that is in use.

        That is the one within ``zp.gathered()``, or the unsharded parameter within a forward or backward of the unit.
        """
        if self.shown is not None:
            _DATA.__get__(self.shown.whole).copy_(full)
        elif self.is_computing:
            _DATA.__get__(self.unsharded).copy_(full)
            self.touched, self._version = False, self.unsharded._version
            self.group.note_own()

    def show(self, copy: ShownWeight | None) -> None:
        """Let a copy stand for the parameter, within ``zp.gathered()``; None: no longer."""
        self.shown = copy
        self._writes += 1  # on all ranks alike: the views that users have are gathered again
        self.group.in_step.was_written = True

    @contextmanager
    def assigning(self, value: Tensor) -> Iterator[Tensor]:
        """Wrap the copy that implements ``param.data = value``; what is to be copied."""
        self.aliases.part(value)
        yield value.clone() if self.aliases.is_turned_view(value) else value
        self.aliases.join(value)

    def follow_requires_grad(self) -> None:
        """Take over a change of ``requires_grad``, within a forward or a backward at once.

        Else the unit is sharded: FSDP2 takes it over when it gathers again.
        """
        if not self.is_computing:
            return self.before_write()
        self._required_grad = self.sharded.requires_grad
        self.unsharded.requires_grad_(self._required_grad)
        self._watch_gradient()

    def gather(self, alias: Tensor) -> Tensor:
        """The whole tensor of ``alias``, the sharded parameter or a view of it, in new memory, without gradients.

        All ranks gather where a graph has the unsharded parameter: it may be that of one rank only.
        """
        self.settle()
        if self.shown is not None:
            return self.shown.whole.detach().to(alias.dtype, copy=True)
        if self.is_computing and not self.group.is_only_taken and self.unsharded.dtype == alias.dtype:
            return _DATA.__get__(self.unsharded).clone()
        return self.group.in_step.gather(self.number, alias)

    def may_copy(self) -> bool:
        """Whether all ranks copy the weight now, so that each may copy its part."""
        return self.group.in_step.may_copy(self.number)

    def open(self, alias: Tensor) -> Tensor:
        """The whole tensor of ``alias``, for a differentiable computation; see :meth:`.WatchedGroup.open`.

        Args:
            alias: The sharded parameter, or a view of its memory.
        """
        self.group.open()
        whole: Tensor = self.unsharded if alias.requires_grad else Tensor.detach(self.unsharded)
        return whole.to(alias.dtype)

    # -- FSDP2 ------------------------------------------------------------------------------------------------------

    def given(self, alias: Tensor) -> Tensor:
        """Let a user's tensor with the memory of the unsharded parameter follow the weight."""
        view: Tensor = WholeView.of(alias, Source(self.sharded, alias))
        self.aliases.add(view)
        return view

    def opened(self, was_kept: bool) -> None:
        """After the unsharded parameter was gathered, or kept: note its version, and set the user's hooks on it."""
        if not was_kept:
            self.unsharded.__class__ = in_form(UnshardedParameter, self.own_class)
        self.touched, self._version = False, self.unsharded._version
        self._required_grad = self.unsharded.requires_grad
        self._watch_gradient()

    def _watch_gradient(self) -> None:
        """Set the user's hooks on the unsharded parameter."""
        if not self._hooks and self.unsharded.requires_grad and self._has_hooks():
            self._hooks = [
                self.unsharded.register_hook(self._run_hooks),
                self.unsharded.register_post_accumulate_grad_hook(self._run_accumulated),
            ]

    def closed(self) -> None:
        """After its memory was freed: users who have kept the unsharded parameter get the sharded one's values."""
        if self.unsharded.untyped_storage().size() == 0:
            self.unsharded.__class__ = in_form(ShardedParameter, self.own_class)

    def await_gradient(self) -> None:
        """Let the end of a backward reduce the unit, even if the backward does not run through its outputs."""
        if self._reached is None and self.unsharded.requires_grad:
            self._reached = self.unsharded.register_post_accumulate_grad_hook(lambda _: self.group.reached())

    def write_back_requires_grad(self) -> None:
        """Copy a changed ``requires_grad`` of the unsharded parameter to the sharded one."""
        if self.unsharded.requires_grad != self._required_grad:
            self._required_grad = self.unsharded.requires_grad
            with as_stored():
                self.sharded.requires_grad_(self._required_grad)

    def write_back(self) -> None:
        """Copy changed values and ``requires_grad`` of the unsharded parameter to the shards; no collective."""
        self.write_back_requires_grad()
        if not self.touched and self.unsharded._version == self._version:
            return
        self.touched, self._version = False, self.unsharded._version
        self.group.in_step.was_written = True
        with as_stored(), torch.no_grad():
            local = self.sharded._local_tensor
            unsharded = _DATA.__get__(self.unsharded)
            spec: Any = _WithDtype(self.sharded, unsharded.dtype)
            now = scatter(unsharded, spec)._local_tensor
            if now.dtype == local.dtype:
                local.copy_(now)
            else:  # elements that were not written keep their precision
                local.copy_(torch.where(local.to(now.dtype) == now, local, now.to(local.dtype)))

    # -- hooks ------------------------------------------------------------------------------------------------------

    def _run_hooks(self, grad: Tensor) -> Tensor:
        for hook in self._held("_backward_hooks"):
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad

    def _run_accumulated(self, param: Tensor) -> None:
        for hook in self._held("_post_accumulate_grad_hooks"):
            hook(param)

    def _has_hooks(self) -> bool:
        """Whether the user has set hooks; called with the parameters as they are stored."""
        return bool(self.holder._backward_hooks or self.holder._post_accumulate_grad_hooks)

    def _held(self, kind: str) -> list[Callable[..., Any]]:
        """The user's hooks of a kind."""
        with as_stored():  # to others the holder stands for the sharded parameter
            return list((getattr(self.holder, kind, None) or {}).values())

    def close(self) -> None:
        """Give both parameters their own classes back."""
        for handle in (*self._hooks, *([] if self._reached is None else [self._reached])):
            handle.remove()
        _as_dtensor(self.sharded)
        vars(self.sharded).update({KEPT: self.aliases.sources(), GIVEN: [*self.aliases.given(), self.unsharded]})
        vars(self.unsharded).pop("link", None)
        vars(self.sharded).pop("serve_others", None)
        self.unsharded.__class__ = self.own_class
        with as_stored():
            _as_dtensor(self.sharded.grad)


def _as_dtensor(tensor: Any) -> None:
    if isinstance(tensor, WholeDTensor):
        vars(tensor).pop("link", None)
        vars(tensor).pop("shared", None)
        tensor.__class__ = DTensor  # type: ignore[assignment]


class _WithDtype:
    """The layout of a DTensor with another dtype, for :func:`scatter`."""

    def __init__(self, tensor: DTensor, dtype: torch.dtype) -> None:
        self.device_mesh, self.placements = tensor.device_mesh, tensor.placements
        self.shape, self.device, self.dtype = tensor.shape, tensor._local_tensor.device, dtype


def follow_grad(whole: nn.Parameter, sharded: Any) -> nn.Parameter:
    """Let ``grad`` of a whole copy be the gradient of the sharded parameter, to read and to write."""
    link = getattr(sharded, "link", None)
    if isinstance(link, Link):
        whole.__class__ = in_form(GatheredParameter, link.own_class)
        whole.link = link  # type: ignore[attr-defined]
    return whole
