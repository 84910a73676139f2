"""FSDP2: backwards reach an unsharded leaf for each parameter; the optimizer has the sharded parameter."""

from __future__ import annotations

from typing import NamedTuple

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_zeroplus.callbacks.audit.shares import named_parameters
from lightning_zeroplus.fsdp.units import unsharded_by_sharded


class Sharded(NamedTuple):
    """A parameter that FSDP2 shards.

    Attributes:
        param: The sharded parameter, which the optimizer has.
        leaf: The unsharded parameter, which backwards reach; the same object in every backward.
        wire: The dtype in which its gradients are reduced.
    """

    param: nn.Parameter
    leaf: nn.Parameter
    wire: torch.dtype


def sharded_parameters(module: nn.Module) -> dict[str, Sharded]:
    """The parameters that FSDP2 shards, by name. All ranks must call it together: it gathers every unit once.

    Args:
        module: The module, with materialized parameters. It is sharded afterwards.

    Raises:
        MisconfigurationException: If a parameter is a DTensor with other placements.
    """
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    for unit in units:
        unit.reshard()  # a root stays unsharded after an evaluation
    named = dict(named_parameters(module))
    for name, param in named.items():
        _check_placements(name, param)
    names = {id(param): name for name, param in named.items()}
    found: dict[str, Sharded] = {}
    for unit in units:
        reduce_dtype = _reduce_dtype(unit)
        for param, leaf in unsharded_by_sharded(unit).items():
            found[names[id(param)]] = Sharded(param, leaf, reduce_dtype or leaf.grad_dtype or leaf.dtype)
    for name, param in named.items():
        if isinstance(param, DTensor) and (name not in found or isinstance(found[name].leaf, DTensor)):
            raise _not_handled(name, param)
    return found


def _check_placements(name: str, param: nn.Parameter) -> None:
    if isinstance(param, DTensor):
        shards = [placement for placement in param.placements if not placement.is_replicate()]
        # Exactly Shard: the strided shard of two parallelisms on one dimension is a subclass in some releases.
        if len(shards) > 1 or any(type(shard) is not Shard or shard.dim != 0 for shard in shards):
            raise _not_handled(name, param)


def _not_handled(name: str, param: DTensor) -> MisconfigurationException:
    return MisconfigurationException(
        f"`GradientAudit` cannot audit {name!r}, a DTensor with the placements {param.placements}: it supports"
        " `fully_shard` without a `shard_placement_fn`, and no tensor parallelism. Audit the loop without these,"
        " or remove the callback."
    )


def _reduce_dtype(unit: FSDPModule) -> torch.dtype | None:
    policy = getattr(fully_shard.state(unit), "_mp_policy", None)  # type: ignore[attr-defined]
    if not isinstance(policy, MixedPrecisionPolicy):
        raise MisconfigurationException(
            f"`GradientAudit` cannot find the dtype in which FSDP2 of torch {torch.__version__} reduces the gradients"
            f" of `{type(unit).__name__}`, so it cannot choose a tolerance. Remove the callback."
        )
    return policy.reduce_dtype
