"""Upstream counts the gradient hooks of a backward, to know its end. Autograd says it in less time."""

from __future__ import annotations

from typing import Any

from lightning_zeroplus.engine.upstream.probe import has

_CALLED_BACK = "backwards that autograd says the end of"


class CountsNoHooks:
    """Overrides on upstream's ZeRO optimizers; each calls ``super()`` where autograd cannot call back at the end."""

    def should_refresh_expected_hook_count(self: Any) -> bool:
        """Whether to count what the backward reaches, which takes a call for each parameter."""
        if has(_CALLED_BACK) and self.queue_post_backward_callback():
            return False
        return super().should_refresh_expected_hook_count()  # type: ignore[misc]

    def update_hook_state_and_maybe_run_epilogue(self: Any, current_expected_count: int) -> None:
        """Count one more hook."""
        if not (has(_CALLED_BACK) and self.queue_post_backward_callback()):
            super().update_hook_state_and_maybe_run_epilogue(current_expected_count)  # type: ignore[misc]
