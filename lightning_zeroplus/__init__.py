"""ZeRO for PyTorch Lightning: every gradient, exactly once, in the right dtype, at the right time.

Importing the package registers its strategy names::

    import lightning_zeroplus
    from lightning.pytorch import Trainer

    Trainer(strategy="zeroplus_stage3")
"""

from lightning_zeroplus import testing
from lightning_zeroplus.callbacks.reduction_monitor import ReductionMonitor
from lightning_zeroplus.losses.cached import CachedLoss
from lightning_zeroplus.precision.zero import ZeroPlusPrecision
from lightning_zeroplus.strategy.names import register_strategies
from lightning_zeroplus.strategy.zero import ZeroPlusStrategy

__all__ = ["CachedLoss", "ReductionMonitor", "ZeroPlusPrecision", "ZeroPlusStrategy", "testing"]

register_strategies()
