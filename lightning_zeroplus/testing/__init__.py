"""Tools for testing training loops: ranks that serve many tests, a gradient reference, a stream sanitizer."""

from typing import TYPE_CHECKING, Any

from lightning_zeroplus.testing.ranks import RankError, RankPool
from lightning_zeroplus.testing.reference import Reference, train_reference

if TYPE_CHECKING:
    from lightning_zeroplus.testing.streams import StreamSanitizer

__all__ = ["RankError", "RankPool", "Reference", "StreamSanitizer", "train_reference"]


def __getattr__(name: str) -> Any:
    # Not imported above: it imports DeepSpeed, which would fix its accelerator before the Trainer picks one.
    if name == "StreamSanitizer":
        from lightning_zeroplus.testing.streams import StreamSanitizer

        return StreamSanitizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
