"""A copy of an engine is a copy of its module."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


class CopiesModule:
    """Mixin for the engine: ``copy.deepcopy`` makes an ordinary module, for example a teacher or an average.

    An engine itself has process groups, and an optimizer that updates its own module.
    """

    module: nn.Module

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)
