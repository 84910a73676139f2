"""A strategy object trains any number of models: what one fit settles on is no setting of the next."""

from __future__ import annotations

import copy
import json
import pickle
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.compile import from_compiled
from torch import Tensor, nn

import lightning_zeroplus as zp
from tests.support.training import Classifier, loader, trainer, weights


class _Wide(Classifier):
    """More parameters than ``Classifier``; the gradients of one are summed in fp32, if asked for."""

    def __init__(self, fp32_bias: bool = False) -> None:
        super().__init__(scheduler=None)
        torch.manual_seed(1)
        self.net.insert(2, nn.Linear(32, 32))
        if fp32_bias:
            self.net[-1].bias.grad_dtype = torch.float32


class _Seen(pl.Callback):
    """The settings that an engine was built with."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        engine: Any = trainer.strategy.model
        self.settings = (engine._config.zero_config.reduce_bucket_size, str(engine._config.grad_accum_dtype))


class _Several:
    """One Trainer, and so one strategy, for several fits of an epoch."""

    def __init__(self, stage: int) -> None:
        self.seen = _Seen()
        # "backward": the dtype of the partitions is that of the sums.
        strategy = zp.ZeroPlusStrategy(stage=stage, reduction="backward")
        # Lightning's sampler shuffles by the number of the epoch.
        self.trainer = trainer(
            strategy, precision="bf16-true", callbacks=[self.seen], max_epochs=0, use_distributed_sampler=False
        )

    def fit(self, module: Classifier) -> tuple[Any, Tensor]:
        before = weights(module)
        self.trainer.fit_loop.max_epochs += 1  # type: ignore[operator]
        self.trainer.fit(module, loader())
        after = weights(module)
        assert not torch.equal(before, after)
        return self.seen.settings, after


def _fits(stage: int) -> list[tuple[bool, bool, Any]]:
    kept = _Several(stage)
    found = []
    for make in (partial(_Wide, fp32_bias=True), partial(Classifier, scheduler=None), _Wide):
        (settings, got), (wanted, want) = kept.fit(make()), _Several(stage).fit(make())
        found.append((settings == wanted, torch.equal(got, want), settings))
    return found


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_fit_leaves_no_settings_to_the_next(ranks2: Any, stage: int) -> None:
    """The bucket size was the first model's, and its fp32 partitions stayed."""
    for found in ranks2.run(_fits, stage):
        assert all(same for same, _, _ in found), found
        assert all(equal for _, equal, _ in found), found
        sizes, dtypes = {settings[0] for _, _, settings in found}, {settings[1] for _, _, settings in found}
        assert len(sizes) == 2 and len(dtypes) == (2 if stage else 1), "the fits ask for different settings"


def _two_models_of_a_fabric() -> list[int]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy=zp.ZeroPlusFabricStrategy(stage=2))
    fabric.launch()
    sizes = []
    for width in (4, 8):
        model = nn.Linear(width, width, bias=False)
        wrapped, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        sizes.append(int(wrapped._forward_module.optimizer.reduce_bucket_size))
    return sizes


def test_each_model_of_a_fabric_has_its_bucket_size(ranks2: Any) -> None:
    assert ranks2.run(_two_models_of_a_fabric) == [[16, 64]] * 2


def _compiled() -> list[bool]:
    strategy = zp.ZeroPlusStrategy(stage=1)
    compiled, plain, found = torch.compile(Classifier(), backend="eager"), Classifier(), []
    module: Any = from_compiled(compiled)
    for each in (module, module, plain, module):
        strategy._lightning_module = each
        found.append(strategy.compile_options is not None)
    return found


def test_a_compiled_module_compiles_no_other() -> None:
    assert _compiled() == [True, True, False, True]


def test_the_config_of_a_strategy_is_fixed() -> None:
    strategy = zp.ZeroPlusStrategy(stage=2)
    for config in (strategy.config, strategy.config["zero_optimization"]):
        before = copy.deepcopy(config)
        for change in (
            lambda config=config: config.update(a=1),
            lambda config=config: config.setdefault("a", 1),
            lambda config=config: config.__setitem__("a", 1),
            lambda config=config: config.pop("stage"),
            lambda config=config: config.clear(),
        ):
            with pytest.raises(TypeError, match="Make another strategy"):
                change()
        assert config == before
    copied = copy.deepcopy(strategy.config)
    copied["zero_optimization"]["stage"] = 1
    assert strategy.config["zero_optimization"]["stage"] == 2
    assert pickle.loads(pickle.dumps(strategy.config)) == strategy.config
    assert json.loads(json.dumps(strategy.config)) == strategy.config
