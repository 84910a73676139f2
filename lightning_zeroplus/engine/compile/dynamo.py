"""What Dynamo must not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.types import FrameAction, FrameExecStrategy

_Function = TypeVar("_Function", bound=Callable[..., Any])

_INVISIBLE: list[Any] = []


def invisible(function: _Function) -> _Function:
    """Let Dynamo run ``function`` in Python, and whatever it calls.

    ``torch.compiler.disable`` would break the graph of a caller that is being traced; this has no effect there.
    """
    _INVISIBLE.append(function.__code__)
    _hide(function.__code__)
    return function


def _hide(code: Any) -> None:
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))


def hide_again() -> None:
    """After ``torch._dynamo.reset()``, which may forget."""
    for code in _INVISIBLE:
        _hide(code)
