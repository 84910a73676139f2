"""Master weights, loss scales, averaged weights, and a module that is built partition by partition."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from safetensors.torch import load_file

import lightning_zeroplus as zp
from tests.checkpoint import model
from tests.checkpoint.model import Tied, fit
from tests.checkpoint.test_resume import AFTER, BEFORE, _check, _difference, _resume, _save
from tests.matrix.cells import pretend_fp16_kernels

# Stage 0 makes an additional step of zero gradients, upstream's initialization, when the engine is built: it goes on
# with its own count.
STAGES: list[Any] = [(0, None), (1, None), (2, None), (3, None), (3, "cpu")]


@pytest.mark.slow
def test_bf16_with_master_weights(ranks2: Any, tmp_path: Path) -> None:
    precision = "bf16-true"
    saved = ranks2.run(partial(_save, str(tmp_path), STAGES, precision=precision), timeout=200)[0]
    names = [f"{stage}{offload}" for stage, offload in STAGES]
    pairs = [(name, STAGES[(index + d) % len(STAGES)]) for d in (0, 1) for index, name in enumerate(names)]
    for resumed in ranks2.run(partial(_resume, str(tmp_path), pairs, precision=precision), timeout=200):
        # Gradients are bf16: a sum that is rounded differently differs by a bit of bf16, not of fp32.
        _check(saved, resumed, 2e-2)
        same = {key: value for key, value in resumed.items() if key[0] == f"{key[1]}{key[2]}"}
        assert len(same) == len(STAGES)
        _check(saved, same, 0)


def _masters_then_mixed(folder: str) -> list[tuple[float, float]]:
    """How far a fit in bf16-mixed begins from the master weights of bf16-true, and how far it trains."""
    _, before = fit(model.strategy(2), BEFORE, save=f"{folder}/true", precision="bf16-true")
    found = []
    for stage in range(4):
        loaded, after = fit(model.strategy(stage), AFTER, f"{folder}/true", precision="bf16-mixed")
        found.append((_difference(loaded, before), _difference(after, loaded)))
    return found


def test_master_weights_become_the_weights_of_mixed_precision(ranks2: Any, tmp_path: Path) -> None:
    """Mixed precision had bf16 weights and master weights once."""
    for found in ranks2.run(_masters_then_mixed, str(tmp_path)):
        assert [error for error, _ in found] == [0] * 4 and min(moved for _, moved in found) > 1e-3


def _fp32_gradients(stage: int, steps: int, path: str | None, save: str | None) -> Any:
    return fit(model.strategy(stage, accumulate_dtype="float32"), steps, path, save, precision="bf16-true")


def test_bf16_optimizer_of_stage_1(ranks2: Any, tmp_path: Path) -> None:
    """With fp32 gradients upstream uses another optimizer at stage 1."""
    path = str(tmp_path / "checkpoint")
    _, before = ranks2.run(_fp32_gradients, 1, BEFORE, None, path)[0]
    _, after = ranks2.run(_fp32_gradients, 1, AFTER, None, None)[0]
    for loaded, trained in ranks2.run(_fp32_gradients, 1, AFTER, path, None):
        assert _difference(loaded, before) == 0 and _difference(trained, after) == 0
    for loaded, _ in ranks2.run(_fp32_gradients, 3, AFTER, path, None):
        assert _difference(loaded, before) == 0


def _scale(stage: int, steps: int, save: str | None, path: str | None, precision: Any) -> tuple[float, int]:
    pretend_fp16_kernels()
    fp16 = {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 1000}
    made = model.strategy(stage, config={"fp16": fp16})
    module = Tied(optimizer="sgd")
    run = model.trainer(made, max_steps=steps, precision=precision)
    run.fit(module, model.loader(), ckpt_path=path)
    if save:
        run.save_checkpoint(save)
    engine = made.model
    return engine.loss_scale_factor(), engine.skipped_steps


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["16-true", "16-mixed"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_loss_scale_goes_on(ranks2: Any, tmp_path: Path, stage: int, precision: str) -> None:
    path = str(tmp_path / "checkpoint")
    scale, skipped = ranks2.run(_scale, stage, 6, path, None, precision)[0]
    assert scale < 2**24 and skipped > 0
    for other, then in ((stage, precision), (2, precision), (1, "16-mixed")):
        assert ranks2.run(_scale, other, 6, None, path, then)[1] == (scale, skipped)


def _sharded(folder: str) -> tuple[Any, Any]:
    fit(model.strategy(2), BEFORE, save=f"{folder}/2")
    whole = fit(model.strategy(3), AFTER, f"{folder}/2")
    return whole, fit(model.strategy(3), AFTER, f"{folder}/2", module=Tied(seed=7, sharded_init=True))


def test_a_module_that_is_built_partition_by_partition(ranks2: Any, tmp_path: Path) -> None:
    for whole, sharded in ranks2.run(_sharded, str(tmp_path)):
        assert _difference(sharded[0], whole[0]) == 0 and _difference(sharded[1], whole[1]) == 0


def _average(stage: int, folder: str) -> dict[str, Any]:
    found = {}
    for name, steps, path in (("all", 9, None), ("first", 5, None), ("rest", 9, f"{folder}/first")):
        module, callback = _WithoutState(), EMAWeightAveraging(decay=0.5)
        callbacks = [callback, _Saves(folder, name, steps)]
        run = model.trainer(model.strategy(stage), max_steps=steps, callbacks=callbacks, enable_checkpointing=True)
        run.fit(module, model.loader(), ckpt_path=path)
        found[name] = {key: value.detach().clone() for key, value in callback._average_model.module.named_parameters()}
    module = _WithoutState(seed=3)
    run = model.trainer(model.strategy(stage))
    run.test(module, model.loader(), ckpt_path=f"{folder}/rest", verbose=False)
    found["tested"] = {key: value.detach().clone() for key, value in module.named_parameters()}
    return found


class _WithoutState(Tied):
    def on_train_start(self) -> None:
        pass


class _Saves(ModelCheckpoint):
    """At the last step, before the average becomes the module's weights."""

    def __init__(self, folder: str, name: str, steps: int) -> None:
        super().__init__(folder, name, every_n_train_steps=steps)
        self.CHECKPOINT_NAME_LAST = name
        self.FILE_EXTENSION = ""


@pytest.mark.parametrize("stage", [0, 2])
def test_averaged_weights_go_on(ranks2: Any, tmp_path: Path, stage: int) -> None:
    for found in ranks2.run(_average, stage, str(tmp_path)):
        for name, value in found["all"].items():
            assert torch.allclose(found["rest"][name], value, rtol=0, atol=1e-6), name
            assert torch.equal(found["tested"][name], found["rest"][name]), name
        assert not torch.equal(found["first"]["first.weight"], found["all"]["first.weight"])
    zp.export(tmp_path / "rest", tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    assert torch.equal(exported["first.weight"], found["tested"]["first.weight"])


class _Normalized(_WithoutState):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = torch.nn.BatchNorm1d(model.CLASSES)

    def forward(self, x: Any) -> Any:
        return super().forward(self.statistics(x))


def _swa(stage: int) -> tuple[bool, str]:
    """Whether the module has the averaged weights in the end, and the last warnings."""
    module, callback = _Normalized(), StochasticWeightAveraging(1e-2, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.trainer(model.strategy(stage), max_epochs=3, callbacks=[callback]).fit(module, model.loader())
    average: Any = callback._average_model
    pairs = zip(module.parameters(), average.parameters(), strict=True)
    return all(torch.equal(*pair) for pair in pairs), " ".join(str(each.message) for each in caught)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_epoch_for_statistics_leaves_averaged_weights_alone(ranks2: Any, stage: int) -> None:
    (first, said), (second, _) = ranks2.run(_swa, stage)
    assert first and second and "does not change the averaged weights" in said
