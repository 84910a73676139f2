"""The loss scale of 16-mixed: who sets it, and what `trainer.precision_plugin.scaler` says.

Programs of tests/programs/families/mixed.py set and log it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_zeroplus as zp
from lightning_zeroplus import ZeroPlusPrecision
from lightning_zeroplus.strategy.deepspeed.config import settings
from tests.matrix.cells import pretend_fp16_kernels
from tests.support.training import Classifier as Module
from tests.support.training import loader, trainer, zero_plus

_GETTERS = ("get_scale", "get_growth_factor", "get_backoff_factor", "get_growth_interval", "is_enabled")


def _read(fp16: dict[str, Any]) -> dict[str, Any]:
    pretend_fp16_kernels()
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


_PLUGINS = {
    "Trainer": (
        LightningMixedPrecision,
        lambda plugin: zp.ZeroPlusStrategy(2, precision_plugin=plugin).precision_plugin,
    ),
    "Fabric": (MixedPrecision, lambda plugin: zp.ZeroPlusFabricStrategy(2, precision=plugin).precision),
}


@pytest.mark.parametrize("kind", _PLUGINS)
def test_a_grad_scaler_of_the_user_sets_it(kind: str) -> None:
    mixed, replaced = _PLUGINS[kind]
    assert replaced(mixed("16-mixed", "cpu")).loss_scale == {}, "the engine's, or the config's"
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    ours = replaced(mixed("16-mixed", "cpu", scaler))
    assert (ours.precision, ours.loss_scale) == ("16-mixed", {"initial_scale_power": 3, "loss_scale_window": 5})
    assert not replaced(mixed("bf16-mixed", "cpu")).loss_scale


@pytest.mark.parametrize("kind", _PLUGINS)
@pytest.mark.parametrize("given", [{"init_scale": 1000.0}, {"growth_factor": 4.0}, {"backoff_factor": 0.25}])
def test_a_grad_scaler_that_deepspeed_cannot_scale_like_is_refused(kind: str, given: dict[str, float]) -> None:
    mixed, replaced = _PLUGINS[kind]
    plugin = mixed("16-mixed", "cpu", torch.amp.GradScaler("cpu", **given))  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match="begins with a power of two, and its factors are"):
        replaced(plugin)


@pytest.mark.parametrize("fp16", [{"loss_scale": 8}, {"initial_scale_power": 3}, {"loss_scale_window": 7}])
def test_a_loss_scale_that_is_set_twice_is_refused(fp16: dict[str, int]) -> None:
    plugin = LightningMixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0))
    ours = zp.ZeroPlusStrategy(2, precision_plugin=plugin).precision_plugin
    config = {"zero_optimization": {"stage": 2}, "fp16": fp16}
    with pytest.raises(
        MisconfigurationException, match=f"'{next(iter(fp16))}': {next(iter(fp16.values()))}.*Give one of them"
    ):
        settings.completed(config, "16-mixed", "cpu", ours.loss_scale)


@pytest.mark.parametrize(
    ("plugin", "precision"),
    [
        (Precision(), "32-true"),
        (HalfPrecision("bf16-true"), "bf16-true"),
        (LightningMixedPrecision("bf16-mixed", "cpu"), "bf16-mixed"),
    ],
)
def test_plugins_of_lightnings_are_replaced(plugin: Any, precision: str) -> None:
    ours = zp.ZeroPlusStrategy(2, precision_plugin=plugin).precision_plugin
    assert isinstance(ours, ZeroPlusPrecision) and ours.precision == precision


def test_a_plugin_of_the_users_own_is_refused() -> None:
    class Mine(LightningMixedPrecision):
        """Its methods would not be called."""

    with pytest.raises(MisconfigurationException, match="not `Mine`"):
        zp.ZeroPlusStrategy(2, precision_plugin=Mine("bf16-mixed", "cpu"))
