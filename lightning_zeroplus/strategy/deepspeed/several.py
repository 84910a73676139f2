"""The optimizers that a LightningModule, or Fabric's user, brings: one, or several over disjoint parameters."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer

from lightning_zeroplus.engine.optimizer.chain import ChainedOptimizer


def chained(optimizers: Sequence[Optimizer], model: nn.Module) -> Optimizer:
    """What an engine is built with: the only optimizer, or all of them in one.

    Raises:
        MisconfigurationException: If there is none, or a parameter is in two of them.
    """
    if not optimizers:
        raise MisconfigurationException("`configure_optimizers` returned an empty list: return an optimizer.")
    if len(optimizers) == 1:
        return optimizers[0]
    names = {param: name for name, param in model.named_parameters()}
    seen: dict[nn.Parameter, int] = {}
    for number, optimizer in enumerate(optimizers):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            other = seen.setdefault(param, number)
            if other != number:
                raise MisconfigurationException(
                    f"The parameter {names.get(param, '?')!r} is in the optimizers {other} and {number}. ZeRO keeps"
                    " the state of each parameter in one partition: give it to one optimizer, or use `strategy='ddp'`."
                )
    return ChainedOptimizer(optimizers)
