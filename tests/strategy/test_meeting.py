"""Where the ranks meet: before each batch, and before a step only where someone runs in between."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy

from lightning_zeroplus.strategy.common.meeting import MeetsOthers, meeting_between_batches


class _Loop:
    """Stands for Lightning's loop over batches."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.asked = trainer, 0

    def _broadcast_sigterm_tensor(self) -> None:
        self.asked += 1


def _trainer(alike: bool, received: bool) -> Any:
    trainer = SimpleNamespace(received_sigterm=received, numbers=[], released=0)

    def meet(number: int) -> bool:
        trainer.numbers.append(number)
        return alike

    def end_reading() -> None:
        assert not trainer.numbers, "weights are released before the ranks meet"
        trainer.released += 1

    trainer.strategy = SimpleNamespace(_meet=meet, end_reading=end_reading)
    trainer.strategy.none_noted = partial(MeetsOthers.none_noted, trainer.strategy)
    trainer.fit_loop = SimpleNamespace(epoch_loop=_Loop(trainer))
    return trainer


@pytest.mark.parametrize(
    ("alike", "received", "asked"), [(True, False, 0), (False, False, 1), (True, True, 1), (False, True, 1)]
)
def test_rank_0_is_asked_only_if_a_rank_is_to_end(alike: bool, received: bool, asked: int) -> None:
    trainer = _trainer(alike, received)
    loop = trainer.fit_loop.epoch_loop
    with meeting_between_batches(trainer):
        loop._broadcast_sigterm_tensor()
        assert trainer.numbers == [int(received)]
        assert loop.asked == asked and trainer.released == 1
        with meeting_between_batches(trainer):
            pass  # a fit within the fit
        assert type(loop) is not _Loop
    assert type(loop) is _Loop
    loop._broadcast_sigterm_tensor()
    assert trainer.numbers == [int(received)], "the loop is as it was"


def test_a_lightning_without_that_collective() -> None:
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=object()))
    with meeting_between_batches(trainer):  # type: ignore[arg-type]
        pass


class _Strategy(MeetsOthers, DDPStrategy):
    pass


class _Between(pl.Callback):
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass


@pytest.mark.parametrize(
    ("callbacks", "is_manual", "meets"),
    [([], False, False), ([pl.Callback()], False, False), ([_Between()], False, True), ([], True, True)],
)
def test_the_ranks_meet_before_a_step_if_something_runs_in_between(
    callbacks: list[Any], is_manual: bool, meets: bool
) -> None:
    strategy = _Strategy()
    engine = SimpleNamespace(meets_before_steps=False)
    strategy._model = engine  # type: ignore[assignment]
    strategy._lightning_module = module = pl.LightningModule()
    module.automatic_optimization = not is_manual
    loops = SimpleNamespace(epoch_loop=None)
    module._trainer = SimpleNamespace(callbacks=callbacks, fit_loop=loops)  # type: ignore[assignment]
    strategy.on_train_start()
    assert engine.meets_before_steps is meets
