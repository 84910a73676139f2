"""What a whole tensor sees of its parameter, and a parameter of its unit; and the forms that a parameter has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_zeroplus.fsdp.whole.aliases import Aliases
from lightning_zeroplus.fsdp.whole.layout import Source, is_users

if TYPE_CHECKING:
    from lightning_zeroplus.fsdp.in_step import UnitsInStep


class UnitSide(Protocol):
    """A unit's group of parameters, a :class:`~.group.WatchedGroup`, as far as one of the parameters needs it.

    Attributes:
        in_step: The collectives of the units, in which all ranks take part.
        is_open: A graph may have weights that were not taken in the unit's own forward.
        keep: Stay unsharded after a forward that no backward follows: within an evaluation step.
    """

    in_step: UnitsInStep
    is_open: bool
    keep: bool

    @property
    def is_unsharded(self) -> bool:
        """Whether the unit is gathered."""

    @property
    def in_forward(self) -> bool:
        """Whether a forward of the unit runs."""

    @property
    def in_pass(self) -> bool:
        """Whether a forward or a backward of the unit runs."""

    @property
    def is_taken(self) -> bool:
        """Whether a graph has the unsharded parameters, from outside of the forward, or for a second derivative."""

    @property
    def is_only_taken(self) -> bool:
        """Whether nothing but such a graph has them."""

    def _to_sharded(self) -> None:
        """Shard the unit."""

    def give_back(self) -> None:
        """Give back the memory of weights that were kept for the next forward."""

    def open(self) -> None:
        """Gather for a computation outside of the unit's own forward."""

    def close(self) -> None:
        """Shard again: no graph has what :meth:`open` has gathered."""

    def note_own(self) -> None:
        """Note that the unsharded weights were written."""

    def assign(self, link: Any, grad: Tensor | None) -> None:
        """In a backward, assign the gradient of one of the parameters."""

    def reached(self) -> None:
        """Note that a backward has reached a weight that was taken outside of the unit's own forward."""


class ShownWeight(Protocol):
    """The whole copy of a parameter within ``zp.gathered()``.

    Attributes:
        whole: The copy.
    """

    whole: nn.Parameter

    def write(self) -> None:
        """Copy what was written to the copy to the shards; no collective."""


class ParameterSide(Protocol):
    """A parameter, a :class:`~.link.Link`, as far as the tensors need it that share its memory.

    Attributes:
        unsharded: The parameter that forwards use and backwards reach.
        holder: Holds the parameter's hooks.
        group: The unit.
        aliases: The tensors that users have got.
        shown: The whole copy that users have within ``zp.gathered()``.
        read: What :func:`.at_address` has given for an entry of a ``state_dict()`` that is still there.
    """

    unsharded: nn.Parameter
    holder: Tensor
    group: UnitSide
    aliases: Aliases
    shown: ShownWeight | None

    @property
    def read(self) -> Source | None: ...

    def note_read(self, source: Source) -> None:
        """Note what :func:`.at_address` gives."""

    @property
    def changes(self) -> object:
        """Another value after each change of the shards."""

    @property
    def is_computing(self) -> bool:
        """Whether a forward, a backward, an evaluation step, or a graph that stays has the unsharded parameter."""

    @property
    def in_backward(self) -> nn.Parameter | None:
        """In a backward, the parameter that autograd accumulates in."""

    def register(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Register a hook of the kind that ``name`` says."""

    def accumulated(self, grad: Tensor | None) -> Tensor | None:
        """In a backward, what the parameter has accumulated on this rank; ``grad`` is what autograd has."""

    def before_grad(self, reader: FrameType | None = None, drops: bool = False) -> None:
        """Make ``grad`` what DDP would show."""

    def was_set(self, attribute: str | None, value: Any) -> None:
        """After an assignment to an attribute."""

    def before_write(self, is_counted: bool = False) -> None:
        """Before the shards change."""

    def settle(self) -> None:
        """Copy what was written to a whole form of the parameter to the shards."""

    def stored(self, full: Tensor) -> None:
        """After ``full`` was written to the shards."""

    def assigning(self, value: Tensor) -> AbstractContextManager[Tensor]:
        """Wrap the copy that implements ``param.data = value``; what is to be copied."""

    def follow_requires_grad(self) -> None:
        """After a change of ``requires_grad``."""

    def write_back_requires_grad(self) -> None:
        """Before ``requires_grad`` is read, which the unsharded parameter may have got."""

    def may_copy(self) -> bool:
        """Whether all ranks copy the weight now."""

    def gather(self, alias: Tensor) -> Tensor:
        """The whole tensor of ``alias`` in new memory."""

    def open(self, alias: Tensor) -> Tensor:
        """The whole tensor of ``alias``, for a differentiable computation."""


class SameParameter(Tensor):
    """A parameter, sharded or not: both are one key of a dict, and one element of a set, as they are one under DDP."""

    link: ParameterSide | None

    def the_sharded(self) -> Any:
        """The parameter that users know: the tensor itself, unless it is another form of one."""
        return self

    def as_listed(self) -> Any:
        """What ``module.parameters()`` gives while the module has this form."""
        return self.the_sharded()

    def __hash__(self) -> int:
        return id(self.the_sharded())

    def __eq__(self, other: Any) -> Any:
        if other is not self and isinstance(other, SameParameter) and self.the_sharded() is other.the_sharded():
            return _AllTrue(torch.ones((), dtype=torch.bool, device=self.device).expand(self.shape))
        return Tensor.__eq__(self, other)


class _AllTrue(Tensor):
    """What comparing a parameter with itself gives. A dict or set asks for the truth of it, which torch refuses."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __bool__(self) -> bool:
        return True


_DATA: Any = Tensor.data
_GRAD: Any = Tensor.grad


class _Form(SameParameter, nn.Parameter):
    """Another form of a sharded parameter."""

    link: Any = None

    def the_sharded(self) -> Any:
        """The sharded parameter, which users may have kept."""
        return self if self.link is None else self.link.sharded


class UnshardedParameter(_Form):
    """The parameter that is registered between a unit's forward and its backward.

    It is an ordinary, whole parameter except for two attributes. Access to ``data`` is noted for
    :meth:`.Link.write_back`, because autograd does not count writes to it. Outside of a backward, ``grad`` is the
    reduced gradient, and not this rank's unreduced one, which FSDP2 takes away.
    """

    @property
    def data(self) -> Tensor:
        data = _DATA.__get__(self)
        if sys._getframe(1).f_code.co_name == "__torch_dispatch__":
            return data  # a mode, such as that of a compiled function's first call, compares types and keeps nothing
        self.note_write()
        return self._given(data)

    @data.setter
    def data(self, value: Tensor) -> None:
        # In place, because FSDP2 always gathers into this memory.
        check_data(self, value)
        self.note_write()
        with nullcontext(value) if self.link is None else self.link.assigning(value) as values:
            _DATA.__get__(self).copy_(values)

    def as_listed(self) -> Any:
        if self.link is not None:
            self.link.write_back_requires_grad()
        return super().as_listed()

    def detach(self) -> Tensor:
        """A tensor that follows the weight, as under DDP; FSDP2 will free the memory that it has now."""
        return self._given(Tensor.detach(self))

    def _given(self, alias: Tensor) -> Tensor:
        if self.link is None or torch.compiler.is_compiling():
            return alias
        if self is self.link.unsharded:
            return self.link.given(alias)
        # A copy within `zp.gathered()` has memory of its own, whose values reach the shards at its end.
        self.link.aliases.add(alias)
        return alias

    @property
    def grad(self) -> Tensor | None:
        if self._is_seen():
            return self.link.sharded.grad
        grad = _GRAD.__get__(self)
        if self.link is None or not torch._C._is_torch_function_enabled():
            return grad
        return grad if torch._C._current_graph_task_id() == -1 else self.link.accumulated(grad)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self._is_seen():
            self.link.sharded.grad = value
            return
        in_backward = self.link is not None and torch._C._current_graph_task_id() != -1
        if in_backward and torch._C._is_torch_function_enabled() and is_users(sys._getframe(1)):
            self.link.group.assign(self.link, value)
        else:
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def note_write(self) -> None:
        """Note that a collective may write to the parameter, which autograd does not count."""
        if self.link is not None:
            self.link.touched = True

    def _is_seen(self) -> bool:
        return (
            torch._C._is_torch_function_enabled()
            and torch._C._current_graph_task_id() == -1
            and self.link is not None
            and (self.link.group.in_forward or not self.link.group.in_pass)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy to an ordinary parameter."""
        memo[id(self)] = copy = nn.Parameter(_DATA.__get__(self).clone(), self.requires_grad)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(_DATA.__get__(self), self.requires_grad).__reduce_ex__(protocol)


class GatheredParameter(UnshardedParameter):
    """The whole copy of a parameter that a module has within ``zp.gathered()``: there, it is the parameter."""

    def as_listed(self) -> Any:
        return self

    def note_write(self) -> None:
        """Do nothing: the copy is compared with the shards."""


class ShardedParameter(_Form):
    """The same parameter, which a user may have kept from a forward, while its memory is freed.

    It is the sharded parameter by another name. Torch would read memory that is not there.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.backward or getattr(func, "__module__", None) == torch.autograd.__name__:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))  # graphs have the unsharded one
        args, kwargs = tree_map_only(ShardedParameter, ShardedParameter.the_sharded, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """As the sharded parameter's."""
        return self.the_sharded().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.the_sharded().__reduce_ex__(protocol)


def check_data(param: Tensor, value: Tensor) -> None:
    """Refuse an assignment to ``param.data`` that would change more than values.

    Raises:
        ValueError: If the value has another shape or dtype.
    """
    for what, new, old in (("shape", tuple(value.shape), tuple(param.shape)), ("dtype", value.dtype, param.dtype)):
        if new != old:
            raise ValueError(
                f"`param.data = ...` with the {what} {new} for a sharded parameter of {old}: its {what} is fixed from"
                " the beginning of the fit to its end."
            )
