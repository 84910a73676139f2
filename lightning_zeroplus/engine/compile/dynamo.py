"""Functions that Dynamo must not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.types import FrameAction, FrameExecStrategy

_Function = TypeVar("_Function", bound=Callable[..., Any])

_INVISIBLE: list[Any] = []


def invisible(function: _Function) -> _Function:
    """Let Dynamo run ``function``, and whatever it calls, in Python.

    ``torch.compiler.disable`` would break the graph of a caller that is being traced; this does not.
    """
    _INVISIBLE.append(function.__code__)
    _hide(function.__code__)
    return function


def _hide(code: Any) -> None:
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))


def hide_again() -> None:
    """Hide all functions again: ``torch._dynamo.reset()`` may have made Dynamo forget."""
    for code in _INVISIBLE:
        _hide(code)
