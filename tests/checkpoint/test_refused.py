"""Checkpoints that something else has to read: it refuses them, our refusals name `export`, and `export` helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_zeroplus as zp
from tests.checkpoint import saving
from tests.fsdp.training import weights
from tests.support.training import BATCHES, Classifier, fit, zero_plus

KINDS = ("zero", "fsdp")


def _strategy(kind: str) -> Any:
    return zp.ZeroPlusFSDPStrategy() if kind == "fsdp" else zero_plus(2) if kind == "zero" else kind


def _save(folder: str) -> dict[str, Tensor]:
    """Save after an epoch under each kind of strategy, and train another one without interruption."""
    trained = {}
    for kind in KINDS:
        fit(_strategy(kind), Classifier(optimizer="adamw"), max_epochs=1).trainer.save_checkpoint(f"{folder}/{kind}")
        trained[kind] = weights(fit(_strategy(kind), Classifier(optimizer="adamw")).net)
    saving.UnderFabric("fabric2").save_checkpoint(f"{folder}/fabric")
    return trained


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """The folder with the checkpoints, and the weights after another epoch."""
    folder = tmp_path_factory.mktemp("saved")
    trained, _ = ranks(2).run(_save, str(folder))
    return folder, trained


def _go_on(kind: str, path: str, optimizer: str = "adamw") -> tuple[str, int, Tensor]:
    """What is said; how many steps were made, and the weights, if nothing is."""
    module = Classifier(optimizer=optimizer, seed=1)
    try:
        fit(_strategy(kind), module, ckpt_path=path)
    except (RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}", 0, torch.zeros(0)
    return "", module.trainer.global_step, weights(module.net)


_PASS_FILE = r"lightning_zeroplus\.export\(\.\.\., 'model\.ckpt', optimizer=True\)`, and pass that file"
_PASS_WEIGHTS = r"with `lightning_zeroplus\.export`,? and pass that file"


@pytest.mark.parametrize(
    ("source", "kind", "optimizer", "says"),
    [
        ("zero", "fsdp", "adamw", r"'.*zero' was saved by `ZeroPlusStrategy`.*" + _PASS_FILE),
        ("fsdp", "zero", "adamw", r"'.*fsdp' was not saved by `ZeroPlusStrategy`.*" + _PASS_FILE),
        ("fabric", "zero", "adamw", r"'.*fabric' was saved by `fabric\.save`.*" + _PASS_WEIGHTS),
        ("zero", "zero", "sgd", r"the state of AdamW, not SGD.*" + _PASS_WEIGHTS),
    ],
)
def test_the_refusal_names_export(
    ranks2: Any, saved: tuple[Path, Any], source: str, kind: str, optimizer: str, says: str
) -> None:
    for said, *_ in ranks2.run(_go_on, kind, str(saved[0] / source), optimizer):
        with pytest.raises(RuntimeError, match=says):
            raise RuntimeError(said)


def test_fsdp_names_export_where_a_file_has_no_optimizer(ranks2: Any, saved: tuple[Path, Any], tmp_path: Path) -> None:
    zp.export(saved[0] / "zero", tmp_path / "weights.ckpt")
    for said, *_ in ranks2.run(_go_on, "fsdp", str(tmp_path / "weights.ckpt")):
        with pytest.raises(RuntimeError, match=r"does not hold states of 1 optimizers.*" + _PASS_WEIGHTS):
            raise RuntimeError(said)


@pytest.mark.parametrize(("source", "kind"), [("zero", "fsdp"), ("fsdp", "zero"), ("zero", "ddp"), ("fsdp", "ddp")])
def test_the_other_strategy_goes_on_from_the_exported_file(
    ranks2: Any, saved: tuple[Path, dict[str, Tensor]], tmp_path: Path, source: str, kind: str
) -> None:
    folder, trained = saved
    zp.export(folder / source, tmp_path / "model.ckpt", optimizer=True)
    for said, steps, got in ranks2.run(_go_on, kind, str(tmp_path / "model.ckpt")):
        assert said == "" and steps == 2 * BATCHES
        assert torch.allclose(got, trained[source], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("source", "kind", "optimizer"), [("zero", "zero", "sgd"), ("zero", "fsdp", "adamw")])
def test_a_new_fit_starts_from_exported_weights(
    ranks2: Any, saved: tuple[Path, Any], tmp_path: Path, source: str, kind: str, optimizer: str
) -> None:
    zp.export(saved[0] / source, tmp_path / "model.safetensors")
    for said, steps, _ in ranks2.run(_go_on, kind, str(tmp_path / "model.safetensors"), optimizer):
        assert said == "" and steps == 2 * BATCHES, "two epochs of its own"


@pytest.mark.parametrize("source", KINDS)
def test_ddp_does_not_read_a_folder(ranks2: Any, saved: tuple[Path, Any], source: str) -> None:
    for said, *_ in ranks2.run(_go_on, "ddp", str(saved[0] / source)):
        assert said.startswith("IsADirectoryError")


def _of_lightning(path: Path) -> Tensor:
    return weights(Classifier.load_from_checkpoint(path).net)


def _of_torch(path: Path) -> Tensor:
    module = Classifier()
    module.load_state_dict(torch.load(path)["state_dict"])
    return weights(module.net)


@pytest.mark.parametrize("load", [_of_lightning, _of_torch])
@pytest.mark.parametrize("source", KINDS)
def test_what_reads_a_file_does_not_read_a_folder(
    saved: tuple[Path, Any], tmp_path: Path, source: str, load: Callable[[Path], Tensor]
) -> None:
    with pytest.raises(IsADirectoryError):
        load(saved[0] / source)
    zp.export(saved[0] / source, tmp_path / "model.ckpt")
    assert not torch.equal(load(tmp_path / "model.ckpt"), weights(Classifier().net)), "not the trained weights"
