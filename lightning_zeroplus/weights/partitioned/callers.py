"""Who calls a function: an engine, or a user's code."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType

#: Packages whose code handles partitions itself.
_ENGINES = ("deepspeed", "lightning_zeroplus")


def is_an_engines(frame: FrameType) -> bool:
    """Whether a frame is of DeepSpeed or this package."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in _ENGINES


def by_an_engine(frame: FrameType | None) -> bool:
    """Whether DeepSpeed or this package has called the torch function, directly or through functions of torch."""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package != "torch":
            return package in _ENGINES
        frame = frame.f_back
    return False


def torch_frames(frame: FrameType | None) -> Iterator[str]:
    """The modules of the functions of torch that have called this one; ``Module._apply`` for that method."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] != "torch":
            return
        yield "Module._apply" if module == "torch.nn.modules.module" and frame.f_code.co_name == "_apply" else module
        frame = frame.f_back
