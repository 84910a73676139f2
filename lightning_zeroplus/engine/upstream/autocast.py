"""The autocast of the caller, which upstream's forward would turn off on a GPU."""

from __future__ import annotations

from typing import Any

import torch


class KeepsAutocast:
    """Mixin for an engine: its forward runs under the autocast that its caller is in, as any module's does.

    Upstream's forward leaves autocast, if its config has no section ``torch_autocast``. That section is more than a
    context: it also reduces gradients, and gathers weights, in 16 bits.
    """

    device: torch.device
    _callers_dtype: torch.dtype | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        kind = self.device.type
        if torch.is_autocast_enabled(kind) and not self.torch_autocast_enabled():
            self._callers_dtype = torch.get_autocast_dtype(kind)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._callers_dtype = None

    def torch_autocast_enabled(self) -> bool:
        """Whether upstream enters autocast in its forward."""
        return self._callers_dtype is not None or bool(super().torch_autocast_enabled())  # type: ignore[misc]

    def torch_autocast_dtype(self) -> torch.dtype:
        """In which dtype: the caller's."""
        configured: torch.dtype = super().torch_autocast_dtype()  # type: ignore[misc]
        return configured if self._callers_dtype is None else self._callers_dtype
