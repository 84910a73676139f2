"""What a whole tensor sees of its parameter, and a parameter of its unit."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from lightning_zeroplus.fsdp.whole.aliases import Aliases
from lightning_zeroplus.fsdp.whole.layout import Source

if TYPE_CHECKING:
    from lightning_zeroplus.fsdp.in_step import UnitsInStep


class UnitSide(Protocol):
    """A unit's group of parameters, a :class:`~.group.WatchedGroup`, as far as one of the parameters needs it.

    Attributes:
        in_step: The collectives of the units, in which all ranks take part.
        is_open: A graph may have weights that were not taken in the unit's own forward.
    """

    in_step: UnitsInStep
    is_open: bool

    @property
    def is_unsharded(self) -> bool:
        """Whether the unit is gathered."""

    @property
    def in_pass(self) -> bool:
        """Whether a forward or a backward of the unit runs."""

    def _to_sharded(self) -> None:
        """Shard the unit."""

    def give_back(self) -> None:
        """Give back the memory of weights that were kept for the next forward."""

    def open(self) -> None:
        """Gather for a computation outside of the unit's own forward."""

    def close(self) -> None:
        """Shard again: no graph has what :meth:`open` has gathered."""

    def reached(self) -> None:
        """Note that a backward has reached a weight that was taken outside of the unit's own forward."""


class ParameterSide(Protocol):
    """A parameter, a :class:`~.link.Link`, as far as the tensors need it that share its memory.

    Attributes:
        unsharded: The parameter that forwards use and backwards reach.
        holder: Holds the parameter's hooks.
        group: The unit.
        aliases: The tensors that users have got.
        read: What :func:`.at_address` has given for an entry of a ``state_dict()`` that is still there.
    """

    unsharded: nn.Parameter
    holder: Tensor
    group: UnitSide
    aliases: Aliases

    @property
    def read(self) -> Source | None: ...

    def note_read(self, source: Source) -> None:
        """Note what :func:`.at_address` gives."""

    @property
    def changes(self) -> object:
        """Another value after each change of the shards."""

    @property
    def in_backward(self) -> nn.Parameter | None:
        """In a backward, the parameter that autograd accumulates in."""

    def before_grad(self, reader: FrameType | None = None, drops: bool = False) -> None:
        """Make ``grad`` what DDP would show."""

    def was_set(self, attribute: str | None, value: Any) -> None:
        """After an assignment to an attribute."""

    def before_write(self) -> None:
        """Before the shards change."""

    def settle(self) -> None:
        """Copy what was written to the unsharded parameter to the shards."""

    def assigning(self, value: Tensor) -> AbstractContextManager[Tensor]:
        """Wrap the copy that implements ``param.data = value``; what is to be copied."""

    def follow_requires_grad(self) -> None:
        """After a change of ``requires_grad``."""

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
