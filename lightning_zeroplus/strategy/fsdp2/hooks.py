"""Users' hooks that run after a gradient was accumulated, as under DDP: with all that ``param.grad`` has by then."""

from __future__ import annotations

from typing import Any

import torch

from lightning_zeroplus.fsdp.late_grads import grad_dtype
from lightning_zeroplus.fsdp.whole.layout import as_stored, gather_now


class HookedParameters:
    """The parameters with such hooks. FSDP2 itself shows a hook what its backward has brought, and no more."""

    def __init__(self) -> None:
        self._links: dict[int, Any] = {}

    def note(self, link: Any) -> None:
        """A user has set a hook for the parameter of ``link``, a :class:`~lightning_zeroplus.fsdp.whole.link.Link`."""
        self._links[link.number] = link

    def __bool__(self) -> bool:
        for number, link in list(self._links.items()):
            if not link.has_accumulated_hooks:
                del self._links[number]
        return bool(self._links)

    def take_averages(self) -> bool:
        """Before a backward: make averaged gradients this rank's own again. A collective.

        Returns:
            Whether there were any: the units wait for a reduction then.
        """
        taken = False
        with as_stored(), torch.no_grad():
            for _, link in sorted(self._links.items()):
                average, unsharded = link.sharded.grad, link.unsharded
                if average is not None and unsharded.grad is None:
                    unsharded.grad, link.sharded.grad = gather_now(average).to(grad_dtype(unsharded)), None
                    taken = True
        return taken

    def check_seen(self) -> None:
        """A backward runs that nobody has announced.

        Raises:
            RuntimeError: If there are averages from an earlier backward, which the hooks do not see.
        """
        with as_stored():
            if self and any(link.sharded.grad is not None for link in self._links.values()):
                raise RuntimeError(
                    "A hook of `register_post_accumulate_grad_hook` does not see the gradients of earlier backwards in"
                    " one that is started by `loss.backward()`: they are averaged already. Call"
                    " `self.manual_backward(loss)`, or start each backward with `zero_grad()`."
                )
