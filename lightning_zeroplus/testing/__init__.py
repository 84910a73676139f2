"""Tools for testing training loops: ranks that live through many tests, and an independent gradient reference."""

from lightning_zeroplus.testing.ranks import RankError, RankPool
from lightning_zeroplus.testing.reference import Reference, train_reference

__all__ = ["RankError", "RankPool", "Reference", "train_reference"]
