"""ZeRO for PyTorch Lightning: every gradient counts exactly once, in the right dtype, at the right time.

Importing the package registers its strategy names::

    import lightning_zeroplus
    from lightning.pytorch import Trainer

    Trainer(strategy="zeroplus_stage3")
"""

from lightning_zeroplus import losses, testing
from lightning_zeroplus.callbacks.audit.report import GradientMismatchError, ParameterAudit
from lightning_zeroplus.callbacks.ema import EMA
from lightning_zeroplus.callbacks.gradient_audit import GradientAudit
from lightning_zeroplus.callbacks.gradient_norms import GradientNorms
from lightning_zeroplus.callbacks.reduction_monitor import ReductionMonitor
from lightning_zeroplus.checkpoint.export import export
from lightning_zeroplus.fsdp.state.gathered import ShardedWeights as _ShardedWeights
from lightning_zeroplus.losses.cached import CachedLoss
from lightning_zeroplus.precision.zero import ZeroPlusPrecision
from lightning_zeroplus.strategy.deepspeed.fabric import ZeroPlusFabricStrategy
from lightning_zeroplus.strategy.deepspeed.trainer import ZeroPlusStrategy
from lightning_zeroplus.strategy.fsdp2.trainer import ZeroPlusFSDPStrategy
from lightning_zeroplus.strategy.names import register_strategies
from lightning_zeroplus.strategy.when_imported import register_when_imported
from lightning_zeroplus.weight_grads.convert import defer_weight_grads
from lightning_zeroplus.weight_grads.grouped import DeferredGroupedLinear
from lightning_zeroplus.weight_grads.linear import DeferredLinear
from lightning_zeroplus.weight_grads.store import WeightGradStore
from lightning_zeroplus.weights.ema import ema_update
from lightning_zeroplus.weights.errors import PartitionedWeightError
from lightning_zeroplus.weights.gathered import gather_sharded_with as _gather_sharded_with
from lightning_zeroplus.weights.gathered import gathered

__all__ = [
    "EMA",
    "CachedLoss",
    "DeferredGroupedLinear",
    "DeferredLinear",
    "GradientAudit",
    "GradientMismatchError",
    "GradientNorms",
    "ParameterAudit",
    "PartitionedWeightError",
    "ReductionMonitor",
    "WeightGradStore",
    "ZeroPlusFSDPStrategy",
    "ZeroPlusFabricStrategy",
    "ZeroPlusPrecision",
    "ZeroPlusStrategy",
    "defer_weight_grads",
    "ema_update",
    "export",
    "gathered",
    "losses",
    "testing",
]

register_strategies()
register_when_imported()
_gather_sharded_with(_ShardedWeights)
