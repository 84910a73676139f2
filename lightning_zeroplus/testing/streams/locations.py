"""The line of the Python program that called an operation."""

from __future__ import annotations

import contextlib
import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import deepspeed
import torch
import typing_extensions

# Files whose frames do not tell which code requested an operation.
_TRANSPARENT = (
    f"{Path(__file__).parent}/",
    f"{Path(__file__).parents[1]}/simulated_cuda/",
    f"{Path(torch.__file__).parent}/",
    f"{Path(deepspeed.__file__).parent}/comm/",
    f"{Path(deepspeed.__file__).parent}/utils/nvtx.py",
    contextlib.__file__,
    typing_extensions.__file__,  # torch deprecates functions with its decorator
)


class Location(NamedTuple):
    """A line of a program.

    Attributes:
        file: The last two parts of its path.
        line: Its number.
        function: The function that it is in.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


@cache
def _is_transparent(file: str) -> bool:
    return file.startswith(_TRANSPARENT)


@cache
def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])


def calling_frame() -> FrameType | None:
    """The nearest frame outside torch, DeepSpeed's wrappers of collectives, and the tools that watch streams."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_transparent(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def calling_location() -> Location:
    """The location of :func:`calling_frame`."""
    frame = calling_frame()
    if frame is None:
        return Location("?", 0, "?")
    return Location(_short(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name)
