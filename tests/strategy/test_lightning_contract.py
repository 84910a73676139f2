"""What the strategies override in Lightning is there, and is called; a release that has renamed it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch.strategies import DeepSpeedStrategy

import lightning_zeroplus as zp
from lightning_zeroplus.strategy.common import probe
from lightning_zeroplus.strategy.common.probe import FABRIC, TRAINER, UnsupportedLightningError, check_lightning


def test_the_installed_release_has_it() -> None:
    check_lightning(TRAINER)
    check_lightning(FABRIC)


@pytest.mark.parametrize(
    ("cls", "name", "made"),
    [
        (DeepSpeedStrategy, "_setup_model_and_optimizer", zp.ZeroPlusStrategy),
        (DeepSpeedStrategy, "_init_optimizers", zp.ZeroPlusStrategy),
        (DDPStrategy, "_get_process_group_backend", zp.ZeroPlusFabricStrategy),
        (Fabric, "setup_optimizers", zp.ZeroPlusFabricStrategy),
    ],
)
def test_a_renamed_method_is_refused(monkeypatch: pytest.MonkeyPatch, cls: type, name: str, made: Any) -> None:
    probe.check_lightning.cache_clear()
    monkeypatch.delattr(cls, name)
    with pytest.raises(UnsupportedLightningError, match=rf"has no {cls.__name__}\.{name}"):
        made(2)


def test_a_method_that_nobody_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    probe.check_lightning.cache_clear()
    monkeypatch.setattr(DeepSpeedStrategy, "_initialize_deepspeed_train", lambda self, model: self._init_optimizers())
    with pytest.raises(UnsupportedLightningError, match="_initialize_deepspeed_train -> _setup_model_and_optimizer"):
        zp.ZeroPlusStrategy(2)
