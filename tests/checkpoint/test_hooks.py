"""What ``on_save_checkpoint``, ``state_dict()`` and ``on_load_checkpoint`` do to the weights counts, as under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file

import lightning_zeroplus as zp
from tests.support.training import Classifier, loader, trainer, weights, zero_plus


class _Plain(Classifier):
    """An optimizer without state, so that a resumed fit shows the weights alone; or AdamW."""

    def __init__(self, seed: int = 0, optimizer: str = "sgd") -> None:
        super().__init__(scheduler=None, seed=seed, optimizer=optimizer)
        self.strict_loading = False


class _HeadOnly(_Plain):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in state.items() if name.startswith("net.2")}


class _HeadOnlyByStateDict(_Plain):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if name.startswith("net.2")}


class _Renaming(_Plain):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.replace("net.", "model."): value for name, value in state.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.replace("model.", "net."): value for name, value in state.items()}


class _Swapping(_Plain):
    """Drops a weight, and brings one of its own."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        assert state["net.0.weight"].shape == (32, 8) and state["net.0.weight"].dtype == torch.float32
        del state["net.0.weight"]
        state["net.2.bias"] = torch.arange(4.0)


MODULES = {each.__name__: each for each in (_Plain, _HeadOnly, _HeadOnlyByStateDict, _Renaming, _Swapping)}


class _AtTheEnd(pl.Callback):
    """Saves while parameters are still partitioned."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def _save(stage: int | None, kind: str, path: str, optimizer: str) -> Any:
    run = trainer("ddp" if stage is None else zero_plus(stage), max_epochs=1, callbacks=[_AtTheEnd(path)])
    module = MODULES[kind](optimizer=optimizer)
    try:
        run.fit(module, loader())
    except RuntimeError as error:
        return str(error)
    return weights(module)


def _resume(stage: int | None, kind: str, path: str, optimizer: str, fit: bool) -> Any:
    run = trainer("ddp" if stage is None else zero_plus(stage), max_epochs=2)
    module = MODULES[kind](seed=5, optimizer=optimizer)
    try:
        if fit:
            run.fit(module, loader(), ckpt_path=path)
        else:
            run.validate(module, loader(64), ckpt_path=path, verbose=False)
    except RuntimeError as error:
        return str(error)
    return weights(module)


SAVED = ["_HeadOnly", "_HeadOnlyByStateDict", "_Renaming"]


@pytest.mark.sampled
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_saving_hooks_are_honoured(ranks2: Any, tmp_path: Path, saved: str, stage: int) -> None:
    """Resumed, and loaded to validate, a module has the weights that DDP gives it."""
    loads = saved if saved == "_Renaming" else "_Plain"
    ours, ddp = str(tmp_path / "ours"), str(tmp_path / "ddp.ckpt")
    want = ranks2.run(_save, None, saved, ddp, "sgd")[0]
    got = ranks2.run(_save, stage, saved, ours, "sgd")[0]
    if stage == 3 and saved == "_Renaming":
        assert "empty rest of a partitioned parameter" in got and not Path(ours).exists()
        return
    assert float((got - want).norm()) <= 1e-6
    for fit in (True, False):
        for fresh in (stage, 3 - stage):
            wanted = ranks2.run(_resume, None, loads, ddp, "sgd", fit)
            for found, weight in zip(ranks2.run(_resume, fresh, loads, ours, "sgd", fit), wanted, strict=True):
                assert float((found - weight).norm() / weight.norm()) <= 1e-6
                if saved != "_Renaming":
                    assert float((found - want).norm()) > 0.1, "what is not saved is not loaded"
    zp.export(ours, tmp_path / "weights.safetensors")
    names = load_file(tmp_path / "weights.safetensors").keys()
    expected = "model." if saved == "_Renaming" else "net.2."
    assert names and all(name.startswith(expected) for name in names)


@pytest.mark.sampled
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stage", [0, 3])
def test_loading_hooks_are_honoured(ranks2: Any, tmp_path: Path, stage: int, optimizer: str) -> None:
    ours, ddp = str(tmp_path / "ours"), str(tmp_path / "ddp.ckpt")
    ranks2.run(_save, None, "_Plain", ddp, optimizer)
    ranks2.run(_save, stage, "_Plain", ours, optimizer)
    for fit in (True, False):
        want = ranks2.run(_resume, None, "_Swapping", ddp, optimizer, fit)[0]
        plain = ranks2.run(_resume, None, "_Plain", ddp, optimizer, fit)[0]
        for found in ranks2.run(_resume, stage, "_Swapping", ours, optimizer, fit):
            assert float((found - want).norm() / want.norm()) <= 1e-6
        assert float((want - plain).norm()) > 0.1
