"""Gradients of parameters that no optimizer has, which DDP averages, too.

Autograd adds them to ``param.grad`` on each rank. Nothing but a look at them needs their average: clipping by hand over
all parameters of the module, for example, or a norm that is logged. So they are averaged when they are looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from torch import Tensor, nn

from lightning_zeroplus.gradients.shown import read_plain, write_plain
from lightning_zeroplus.gradients.tasks import refuse_both
from lightning_zeroplus.weights.agreement import meet

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from lightning_zeroplus.engine.host import EngineHost

_data: Any = torch.Tensor.data


class AveragesOutside:
    """The part of a gradient accumulation that averages them.

    Like DDP's, these gradients add up until ``module.zero_grad()`` or ``param.grad = None``: an optimizer's
    ``zero_grad()`` does not know them.

    Attributes:
        follows_outside: When the last backward began, they had something that is an average under DDP, or in part.
        outside_was_seen: The user has looked at one, on all ranks, and may have kept it.
    """

    engine: EngineHost
    params: list[nn.Parameter]
    optimized: frozenset[int]
    frozen: frozenset[int]
    serve_others: Callable[[], None]
    full_shape: Callable[[nn.Parameter], AbstractContextManager[None]]
    follows_outside = False
    outside_was_seen = False
    _outside_due = False
    _outside_in_part = False

    def is_outside(self, index: int) -> bool:
        """Whether no optimizer has this parameter."""
        return index not in self.optimized and index not in self.frozen

    def note_outside(self, is_own: bool) -> None:
        """A backward begins, or a window has ended: all that these gradients have is averaged from now on.

        Args:
            is_own: The backward is in ``no_sync()`` or a window: what it adds is this rank's own.
        """
        self.follows_outside = self._outside_due or self._outside_in_part
        if not is_own:
            self._outside_due, self._outside_in_part = True, False
        elif self._outside_due:
            others = enumerate(self.params) if len(self.optimized) < len(self.params) else ()
            there = any(read_plain(param) is not None for index, param in others if self.is_outside(index))
            self._outside_due, self._outside_in_part = False, there

    def write_outside(self, param: nn.Parameter, value: Tensor | None) -> None:
        """``param.grad = value``, in the full shape also where the parameter is partitioned."""
        with self.full_shape(param):
            write_plain(param, value)

    def average_outside(self, is_looked_at: bool = True) -> None:
        """Average them over the ranks, if there was a backward since the last time. A collective then.

        What has been averaged before is alike on all ranks, so that the average of the sum is the sum of averages.

        Args:
            is_looked_at: The user looks at one, and may keep it.

        Raises:
            RuntimeError: If they are averages in part under DDP, which nobody has looked at.
        """
        if self._outside_in_part:
            refuse_both("read")
        params = [param for index, param in enumerate(self.params) if self.is_outside(index)]
        if not self._outside_due or not params:
            return
        self._outside_due = False
        self.outside_was_seen |= is_looked_at
        self.serve_others()
        meet("Access to `param.grad` of a parameter that no optimizer has, which is averaged", details="")
        engine: Any = self.engine
        group = engine.seq_data_parallel_group
        some = torch.tensor([read_plain(param) is not None for param in params], device=engine.device).int()
        dist.all_reduce(some, op=dist.ReduceOp.MAX, group=group)
        for param, has_one in zip(params, some.tolist(), strict=True):
            if has_one:
                grad = _gradient(param, engine.device)
                dist.all_reduce(grad, group=group)
                grad.div_(dist.get_world_size(group=group))

    def follow_outside(self) -> None:
        """After a backward, on all ranks: average what the user may have kept."""
        if self.outside_was_seen and not self._outside_in_part:
            self.average_outside()


def _gradient(param: Any, device: torch.device) -> Tensor:
    grad: Tensor | None = read_plain(param)
    if grad is None:
        grad = torch.zeros(getattr(param, "ds_shape", param.shape), dtype=param.dtype, device=device)
        own = _data.__get__(param)
        # At stage 3 the parameter is empty, and takes a gradient of its own shape only.
        _data.__set__(param, grad)
        write_plain(param, grad)
        _data.__set__(param, own)
    return grad.detach()
