"""Users' hooks that run after a gradient was accumulated, as under DDP: with all that ``param.grad`` has by then."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from typing_extensions import override

from lightning_zeroplus.fsdp.late_grads import grad_dtype
from lightning_zeroplus.fsdp.whole.layout import as_stored, gather_now
from lightning_zeroplus.gradients.ranks.agreement import Presence
from lightning_zeroplus.strategy.common.meeting import MeetsOthers


class HookedParameters:
    """The parameters with such hooks. FSDP2 itself shows a hook what its backward has brought, and no more.

    A hook may be on one rank only, and all ranks take part in collectives for it: they agree when a fit begins,
    and between batches.
    """

    def __init__(self) -> None:
        self._own: dict[int, Any] = {}
        self._shared: dict[int, Any] | None = None

    def note(self, link: Any) -> None:
        """A user has set a hook for the parameter of ``link``, a :class:`~lightning_zeroplus.fsdp.whole.link.Link`."""
        self._own[link.number] = link

    def are_here(self) -> bool:
        """Whether this rank has such hooks."""
        for number, link in list(self._own.items()):
            if not link.has_accumulated_hooks:
                del self._own[number]
        return bool(self._own)

    def are_unshared(self) -> bool:
        """Whether there is one that the other ranks do not know."""
        return self.are_here() and not self._own.keys() <= (self._shared or {}).keys()

    def share(self, links: Iterable[Any], hosts: Any) -> None:
        """Agree on the parameters with such hooks. All ranks call it.

        Args:
            links: Of all parameters.
            hosts: The ranks, whose tensors are the host's.
        """
        numbered = {link.number: link for link in links}
        found = Presence(numbered, self._own, torch.device("cpu"), hosts).result()
        self._shared = {number: numbered[number] for number in found}

    @property
    def _known(self) -> dict[int, Any]:
        return self._own if self._shared is None else self._shared

    def __bool__(self) -> bool:
        """Whether some rank has such hooks, as far as all ranks know."""
        return self.are_here() if self._shared is None else bool(self._shared)

    def take_averages(self) -> bool:
        """Before a backward: make averaged gradients this rank's own again. A collective.

        Returns:
            Whether there were any: the units wait for a reduction then.
        """
        taken = False
        with as_stored(), torch.no_grad():
            for _, link in sorted(self._known.items()):
                average, unsharded = link.sharded.grad, link.unsharded
                if average is not None and unsharded.grad is None:
                    unsharded.grad, link.sharded.grad = gather_now(average).to(grad_dtype(unsharded)), None
                    taken = True
        return taken

    def check_seen(self) -> None:
        """The user has started a backward by ``loss.backward()``.

        Raises:
            RuntimeError: If there are averages from an earlier backward, which the hooks do not see.
        """
        with as_stored():
            if self and any(link.sharded.grad is not None for link in self._known.values()):
                raise RuntimeError(
                    "A hook of `register_post_accumulate_grad_hook` does not see the gradients of earlier backwards in"
                    " one that is started by `loss.backward()`: they are averaged already. Call"
                    " `self.manual_backward(loss)`, or start each backward with `zero_grad()`."
                )


class TellsOthers(MeetsOthers):
    """What a rank tells the others between batches, apart from its signals."""

    _gradients: Any

    @override
    def has_unshared_hooks(self) -> bool:
        return self._gradients is not None and self._gradients.hooked.are_unshared()

    @override
    def share_users_hooks(self) -> None:
        if self._gradients is not None:
            in_step = self._gradients.in_step
            self._gradients.hooked.share((link for group in in_step.groups for link in group.links), in_step.hosts)

    @override
    def is_alone_in_windows(self) -> bool:
        gradients = self._gradients
        return gradients is not None and gradients.unsynced and gradients.in_step.are_whole()
