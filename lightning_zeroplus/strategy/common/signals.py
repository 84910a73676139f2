"""SIGTERM, and the signal by which SLURM announces a preemption: noted at once, acted on between two batches.

A signal reaches the ranks at different moments, each in the middle of something. Lightning's handlers communicate: the
one for SIGTERM broadcasts, the one for requeueing saves a checkpoint. Another rank may be in another collective then,
and both wait for ever. And Lightning ends a rank at its own next check, which another rank may have passed.

Here a handler only notes the signal. Lightning's loop broadcasts a flag of rank 0 before each batch; in its place the
ranks reduce the notes of all of them. So all act before the same batch. They do so once more at the end of the fit:
after the last batch there is no next one, and the signal would be lost.

The same reduction says whether any rank has hooks that run after a gradient was accumulated: all ranks take part in
collectives for them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_zeroplus.gradients.patches.specialize import generalize, specialize

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)
_END, _REQUEUE, _HOOKS = 1, 2, 4
_MOST_RANKS = 2**20
_ONE = {kind: _MOST_RANKS**place for place, kind in enumerate((_END, _REQUEUE, _HOOKS))}


def noted(trainer: pl.Trainer) -> int:
    """The signals that this rank has received in this fit, and on which the ranks have not acted yet; 0: none.

    A hook that the other ranks do not know counts as one.
    """
    ends = _END if getattr(trainer, "received_sigterm", False) else 0
    ends |= _HOOKS if getattr(trainer.strategy, "has_unshared_hooks", bool)() else 0
    return ends | getattr(getattr(trainer, "_signal_connector", None), "noted", 0)


class _Notes:
    """Mixin for Lightning's signal connector."""

    noted = 0

    def register_signal_handlers(self) -> None:
        self.noted = 0
        super().register_signal_handlers()  # type: ignore[misc]

    def _sigterm_notifier_fn(self: Any, signum: Any, frame: Any) -> None:
        log.info(f"Rank {self.trainer.global_rank} has received SIGTERM, and ends with the others between two batches.")
        is_first, self.noted = not self.noted & _END, self.noted | _END
        launcher = self.trainer.strategy.launcher
        if is_first and launcher is not None:
            launcher.kill(signum)  # to the ranks that this process has launched
        if self.trainer.state.fn != TrainerFn.FITTING:
            self.received_sigterm = True

    def _slurm_sigusr_handler_fn(self: Any, signum: Any, frame: Any) -> None:
        if self.trainer.state.fn != TrainerFn.FITTING:
            super()._slurm_sigusr_handler_fn(signum, frame)  # type: ignore[misc]
            return
        self.noted |= _REQUEUE
        self.requeue_signal = signum

    def act(self: Any, ends: bool, requeues: bool) -> None:
        """Do what Lightning's handlers do; all ranks call it."""
        self.noted = 0
        if requeues:
            super()._slurm_sigusr_handler_fn(getattr(self, "requeue_signal", None), None)  # type: ignore[misc]
        self.received_sigterm = ends


def _act(trainer: Any) -> bool:
    """Act on the signals that any rank has noted; all ranks call it. Whether the fit ends."""
    mine = noted(trainer)
    # The ranks are counted, each kind in digits of its own: gloo takes twice as long for three numbers as for one.
    counts = sum(_ONE[kind] for kind in _ONE if mine & kind)
    found = torch.tensor(counts, device=trainer.strategy.root_device)
    dist.all_reduce(found)
    everywhere = int(found)
    ends, requeues, hooks = (everywhere // one % _MOST_RANKS > 0 for one in _ONE.values())
    if hooks and isinstance(trainer.strategy, ActsOnSignals):
        trainer.strategy.share_users_hooks()
    if ends or requeues:
        trainer._signal_connector.act(ends, requeues)
    return ends


class _Agrees:
    """Mixin for Lightning's loop over batches."""

    def _broadcast_sigterm_tensor(self: Any) -> None:
        if _act(self.trainer):
            super()._broadcast_sigterm_tensor()  # type: ignore[misc]


@contextmanager
def _acting_together(trainer: pl.Trainer) -> Iterator[None]:
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    known = all(hasattr(connector, name) for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"))
    if not known or not hasattr(loop, "_broadcast_sigterm_tensor") or isinstance(loop, _Agrees):
        yield  # another Lightning; or a fit within a fit, such as a tuner's
        return
    specialize(connector, _Notes)
    specialize(loop, _Agrees)
    try:
        yield
    finally:
        generalize(loop, _Agrees)
        generalize(connector, _Notes)


class ActsOnSignals(ParallelStrategy):
    """Mixin for a strategy of the Trainer: a signal ends all ranks between the same two batches."""

    _signals: ExitStack | None = None

    def none_noted(self, signals: int) -> bool:
        """Whether the ranks know already that none of them has noted a signal.

        Args:
            signals: What this rank has noted.
        """
        return False

    def has_unshared_hooks(self) -> bool:
        """Whether a hook of this rank's user runs after a gradient was accumulated, which other ranks do not know."""
        return False

    def share_users_hooks(self) -> None:
        """Agree with all ranks on the parameters with such hooks."""

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        if isinstance(self.lightning_module.trainer.fit_loop.epoch_loop, _Agrees):
            self.share_users_hooks()  # a hook that one rank sets from now on is none until all know it

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.world_size > 1 and not self.none_noted(noted(trainer)) and _act(trainer):
            raise SIGTERMException

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.world_size > 1 and self._signals is None:
            self._signals = ExitStack()
            self._signals.enter_context(_acting_together(trainer))
        super().setup(trainer)

    @override
    def teardown(self) -> None:
        signals, self._signals = self._signals, None
        try:
            super().teardown()
        finally:
            if signals is not None:
                signals.close()
