"""Whether ``torch.compile`` has compiled something."""

from __future__ import annotations

import sys


def has_compiled() -> bool:
    """Whether this process has compiled code, which keeps what it has once found of modules; also if it may have."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    return compiler is not None and getattr(compiler, "FRAME_COUNTER", 1) != 0
