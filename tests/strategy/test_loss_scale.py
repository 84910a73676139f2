"""What `trainer.precision_plugin.scaler` says in 16-mixed. Programs of tests/programs/families/mixed.py log it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_zeroplus import ZeroPlusPrecision
from tests.support.training import Classifier as Module
from tests.support.training import loader, trainer, zero_plus

_GETTERS = ("get_scale", "get_growth_factor", "get_backoff_factor", "get_growth_interval", "is_enabled")


def _read(fp16: dict[str, Any]) -> dict[str, Any]:
    run = trainer(zero_plus(2, {"fp16": fp16} if fp16 else None), precision="16-mixed", max_steps=1)
    run.fit(Module(), loader())
    return {name: getattr(run.precision_plugin.scaler, name)() for name in _GETTERS}


def test_its_settings_are_torchs(ranks2: Any) -> None:
    torchs = torch.amp.GradScaler("cpu")
    assert ranks2.run(_read, {}) == [{name: getattr(torchs, name)() for name in _GETTERS}] * 2


def test_a_static_scale_does_not_grow(ranks2: Any) -> None:
    for said in ranks2.run(_read, {"loss_scale": 128.0}):
        assert (said["get_scale"], said["get_growth_factor"], said["get_backoff_factor"]) == (128.0, 1.0, 1.0)


@pytest.mark.parametrize("name", ["scale", "unscale_", "step", "update", "set_growth_interval", "load_state_dict"])
def test_what_changes_it_is_refused_with_the_remedy(name: str) -> None:
    scaler = ZeroPlusPrecision("16-mixed").scaler
    with pytest.raises(MisconfigurationException, match=rf"scaler\.{name}`: under ZeRO .*initial_scale_power"):
        getattr(scaler, name)
    assert not hasattr(scaler, "misspelled")


def test_it_says_that_there_is_no_engine_yet() -> None:
    with pytest.raises(MisconfigurationException, match="Read it in `on_fit_start` or later"):
        ZeroPlusPrecision("16-mixed").scaler.get_scale()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-true"])
def test_others_have_none(precision: str) -> None:
    assert ZeroPlusPrecision(precision).scaler is None
