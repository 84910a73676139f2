"""Choose the accumulation for one of upstream's optimizers."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.optim import Optimizer

from lightning_zeroplus.engine.accumulation import GradientAccumulation
from lightning_zeroplus.engine.families import older_deepspeed
from lightning_zeroplus.engine.families.low_precision import MasterWeightAccumulation, ScaledAccumulation
from lightning_zeroplus.engine.families.replicated import BF16Accumulation, ReplicatedAccumulation


def choose(optimizer: Any, scales_losses: bool) -> type[GradientAccumulation]:
    """The accumulation for an engine's optimizer.

    Args:
        optimizer: Upstream's, or at stage 0 the torch optimizer.
        scales_losses: Whether fp32 weights are trained with a loss scale.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return older_deepspeed.zero3()
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return older_deepspeed.zero12()
    if isinstance(optimizer, BF16_Optimizer):
        return BF16Accumulation
    if isinstance(optimizer, Optimizer):
        return ScaledAccumulation if scales_losses else ReplicatedAccumulation
    return MasterWeightAccumulation
