"""What is trained: weights, groups of the optimizer, and the units of FSDP2, by shape and dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zeroplus.fsdp.wrap import WrapPolicy, planned_units
from lightning_zeroplus.plan.optimizers import OptimizersOnMeta
from lightning_zeroplus.precision.conversions import autocast_dtype

#: The dtypes of weights under the Trainer's precisions that cast them; the others compute in another dtype, or in fp32.
_TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", *_TRUE)


class Weight(NamedTuple):
    """A parameter.

    Attributes:
        name: Its name.
        shape: Its shape.
        dtype: Its dtype under the Trainer's precision and DDP.
        trains: Whether it requires a gradient.
        group: The parameter group that has it, counted over all optimizers; None: no optimizer has it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trains: bool
    group: int | None

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


class Unit(NamedTuple):
    """Parameters that FSDP2 gathers and reduces together.

    Attributes:
        weights: The parameters.
        stays: Whether it stays gathered from its forward to its backward.
    """

    weights: tuple[Weight, ...]
    stays: bool


class Model(NamedTuple):
    """What is trained.

    Attributes:
        weights: The parameters, in the order of ``module.parameters()``.
        buffers: Bytes of the buffers.
        optimizers: The optimizers.
        precision: The Trainer's.
        is_manual: Whether ``training_step`` makes the backwards and the step.
        units: The units of FSDP2; None: it cannot shard the module, and ``no_units`` says why.
        no_units: See ``units``.
    """

    weights: tuple[Weight, ...]
    buffers: int
    optimizers: OptimizersOnMeta
    precision: str
    is_manual: bool
    units: tuple[Unit, ...] | None
    no_units: str = ""

    @property
    def trained(self) -> list[Weight]:
        """The parameters that get a gradient."""
        return [weight for weight in self.weights if weight.trains]

    def grouped(self) -> list[list[Weight]]:
        """The trained parameters of each group of the optimizers."""
        groups: list[list[Weight]] = [[] for _ in self.optimizers.groups]
        for weight in self.trained:
            if weight.group is not None:
                groups[weight.group].append(weight)
        return groups


def describe(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    precision: str = "32-true",
    wrap: WrapPolicy | None = None,
    is_manual: bool = True,
    reshard_after_forward: bool | None = None,
) -> Model:
    """Describe a module.

    Args:
        module: The module, on any device, also the meta device.
        optimizers: The torch optimizers over its parameters.
        precision: The Trainer's.
        wrap: Of :class:`~lightning_zeroplus.ZeroPlusFSDPStrategy`.
        is_manual: Whether ``training_step`` makes the backwards and the step.
        reshard_after_forward: Of ``ZeroPlusFSDPStrategy``: False or None. None is what it is on a GPU: the children of
            the module stay gathered, and the units within them do not.

    Raises:
        ValueError: If the precision is not supported, or the module has no parameter that requires a gradient.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"`precision={precision!r}` cannot be planned: choose one of {', '.join(PRECISIONS)}.")
    groups: dict[Any, int] = {}
    count = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            groups.update(dict.fromkeys(group["params"], count))
            count += 1
    weights = {
        param: Weight(name, tuple(param.shape), _dtype(param, precision), param.requires_grad, groups.get(param))
        for name, param in module.named_parameters()
    }
    if not any(weight.trains for weight in weights.values()):
        raise ValueError(f"`{type(module).__name__}` has no parameter that requires a gradient: nothing is trained.")
    units, reason = None, ""
    try:
        planned = planned_units(module, wrap)
        stay = reshard_after_forward is False
        units = tuple(Unit(tuple(weights[param] for param in params), stay or is_root) for params, is_root in planned)
    except ValueError as error:
        reason = str(error)
    return Model(
        tuple(weights.values()),
        sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
        OptimizersOnMeta(optimizers),
        precision,
        is_manual,
        units,
        reason,
    )


def _dtype(param: nn.Parameter, precision: str) -> torch.dtype:
    return _TRUE.get(precision, param.dtype) if param.is_floating_point() else param.dtype


def casts(model: Model, weights: Sequence[Weight]) -> list[int]:
    """Bytes of the copy that autocast makes of each of these weights, and that its backward reads; empty without it."""
    dtype = autocast_dtype(model.precision)
    return [] if dtype is None else [size([weight], dtype) for weight in weights if len(weight.shape) > 1]


def elements(weights: Sequence[Weight]) -> int:
    """Elements of some parameters."""
    return sum(weight.numel for weight in weights)


def size(weights: Sequence[Weight], dtype: torch.dtype | None = None) -> int:
    """Bytes of some parameters, in one dtype or in theirs."""
    return sum(weight.numel * (dtype or weight.dtype).itemsize for weight in weights)


def largest(weights: Sequence[Weight], dtype: torch.dtype | None = None) -> int:
    """Bytes of the largest parameter."""
    return max((size([weight], dtype) for weight in weights), default=0)
