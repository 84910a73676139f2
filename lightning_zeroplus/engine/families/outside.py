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
from lightning_zeroplus.weights.agreement import meet

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_zeroplus.engine.host import EngineHost

_data: Any = torch.Tensor.data


class AveragesOutside:
    """The part of a gradient accumulation that averages them.

    Like DDP's, these gradients add up until ``module.zero_grad()`` or ``param.grad = None``: an optimizer's
    ``zero_grad()`` does not know them.
    """

    engine: EngineHost
    params: list[nn.Parameter]
    optimized: frozenset[int]
    frozen: frozenset[int]
    serve_others: Callable[[], None]
    _outside_due = False
    _outsiders: tuple[int, list[nn.Parameter]] | None = None

    def is_outside(self, index: int) -> bool:
        """Whether no optimizer has this parameter."""
        return index not in self.optimized and index not in self.frozen

    def outsiders(self) -> list[nn.Parameter]:
        """The parameters that the user's optimizers do not have, also where upstream reduces their gradients."""
        groups = self.engine.user_groups.params
        if self._outsiders is None or self._outsiders[0] != len(groups):  # groups are added, and never removed
            inside = {id(param) for group in groups for param in group}
            self._outsiders = len(groups), [param for param in self.params if id(param) not in inside]
        return self._outsiders[1]

    def average_outside(self) -> None:
        """Average them over the ranks, if there was a backward since the last time. A collective then.

        What has been averaged before is alike on all ranks, so that the average of the sum is the sum of averages.
        """
        if not self._outside_due:
            return
        self._outside_due = False
        self.serve_others()
        meet("Access to `param.grad` of a parameter that no optimizer has, which is averaged", details="")
        engine: Any = self.engine
        group = engine.seq_data_parallel_group
        params = [param for index, param in enumerate(self.params) if self.is_outside(index)]
        some = torch.tensor([read_plain(param) is not None for param in params], device=engine.device).int()
        dist.all_reduce(some, op=dist.ReduceOp.MAX, group=group)
        for param, has_one in zip(params, some.tolist(), strict=True):
            if has_one:
                grad = _gradient(param, engine.device)
                dist.all_reduce(grad, group=group)
                grad.div_(dist.get_world_size(group=group))


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
