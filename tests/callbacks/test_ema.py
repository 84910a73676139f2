"""EMA: arguments, refusals, warnings. Programs of the family ``averages`` show its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_zeroplus as zp

_QUIET: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
_QUIET |= {"enable_model_summary": False, "limit_val_batches": 2, "max_epochs": 1, "limit_train_batches": 3}


def _trainer(folder: Path, *callbacks: Any) -> Trainer:
    return Trainer(callbacks=list(callbacks), default_root_dir=folder, enable_checkpointing=False, **_QUIET)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"decay": 1.5}, r"decay=1.5\): give a number from 0 to 1"),
        ({"decay": True}, r"decay=True"),
        ({"decay": 0.9, "every_n_steps": 0}, r"every_n_steps=0\): give a positive integer"),
        ({"decay": 0.9, "warmup": -1}, r"warmup=-1\): give a number of at least 0"),
        ({"decay": 0.9, "warmup": None}, r"warmup=None"),
    ],
)
def test_refuses_arguments(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r"zp.EMA\(" + says):
        zp.EMA(**arguments)


def test_refuses_a_strategy_whose_shards_it_does_not_know(tmp_path: Path) -> None:
    class Unknown(FSDPStrategy):
        """Lightning's own FSDP has flat parameters."""

    trainer = _trainer(tmp_path, zp.EMA(0.9))
    with (
        patch.object(type(trainer), "strategy", Unknown()),
        pytest.raises(MisconfigurationException, match="`Unknown`"),
    ):
        trainer.callbacks[0].setup(trainer, BoringModel(), "fit")  # type: ignore[attr-defined]


def test_says_that_a_test_uses_the_weights(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, zp.EMA(0.9))
    for run in (trainer.validate, trainer.test):
        with pytest.warns(UserWarning, match=f"`trainer.{run.__name__}` uses the weights, .*export"):
            run(BoringModel(), verbose=False)


def test_a_checkpoint_without_the_average_is_not_resumed(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, zp.EMA(0.9))
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=False)
    del saved["zeroplus_ema"]
    torch.save(saved, tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match="has the state of an `EMA`, and no average"):
        resumed = _trainer(tmp_path, zp.EMA(0.9))
        resumed.fit_loop.max_epochs = 2
        resumed.fit(BoringModel(), ckpt_path=tmp_path / "one.ckpt")


def test_counts_updates(tmp_path: Path) -> None:
    average = zp.EMA(0.9, every_n_steps=2)
    trainer = _trainer(tmp_path, average)
    trainer.fit(BoringModel())
    assert (trainer.global_step, average.updates) == (3, 1)
