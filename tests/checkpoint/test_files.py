"""One file from any checkpoint, and any training from one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import lightning_zeroplus as zp
from lightning_zeroplus.checkpoint.data_only import load_data
from lightning_zeroplus.checkpoint.fragments import Fragment, StoredTensors
from lightning_zeroplus.cli import main
from tests.checkpoint import model
from tests.checkpoint.model import Tied, fit
from tests.fsdp import training as fsdp
from tests.matrix.cells import pretend_fp16_kernels

KINDS = [(stage, precision) for stage in range(4) for precision in ("32-true", "bf16-true")]


def _save(folder: str) -> dict[str, Any]:
    """Master weights and buffers of what is saved at every stage, and of a plain Lightning checkpoint."""
    found: dict[str, Any] = {}
    for stage, precision in KINDS:
        name = f"{stage}-{precision}"
        options: dict[str, Any] = {"precision": precision}
        found[name] = fit(model.strategy(stage), 4, save=f"{folder}/{name}", **options)[1]
        if name == "3-bf16-true":
            pretend_fp16_kernels()
            run = model.trainer(model.strategy(stage), max_steps=1, precision="16-true")
            run.fit(_Plain(), model.loader())
            run.save_checkpoint(f"{folder}/scaled")
            run.save_checkpoint(f"{folder}/weights-only", weights_only=True)
    module = _Plain()
    run = model.trainer("ddp", max_steps=4)
    run.fit(module, model.loader())
    run.save_checkpoint(f"{folder}/plain.ckpt")
    found["plain.ckpt"] = {name: value.clone() for name, value in module.state_dict().items()}
    run = model.trainer("ddp", max_steps=9)
    run.fit(module, model.loader(), ckpt_path=f"{folder}/plain.ckpt")
    found["on"] = _by_name(module, run.optimizers[0])
    for distributed in (True, False):
        task = fsdp.Task(optimizer="adamw")
        run = fsdp.trainer(fsdp.ours(save_distributed_checkpoint=distributed), max_steps=2)
        run.fit(task, fsdp.loader())
        run.save_checkpoint(f"{folder}/fsdp{distributed}")
        found[f"fsdp{distributed}"] = {name: fsdp.full(value) for name, value in task.state_dict().items()}
    return found


class _Plain(Tied):
    """Without what only our engines have."""

    def on_train_start(self) -> None:
        pass


def _by_name(module: Tied, optimizer: Any) -> dict[str, Tensor]:
    names = {param: name for name, param in module.named_parameters()}
    found = {f"{name} None": param.detach().flatten().clone() for param, name in names.items()}
    for param, state in optimizer.state.items():
        found |= {f"{names[param]} {key}": value.flatten().clone() for key, value in state.items()}
    return found | {"seen": module.seen.clone()}


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, ranks(2).run(_save, str(folder), timeout=200)[0]


def _names() -> list[str]:
    return [f"{stage}-{precision}" for stage, precision in KINDS]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", _names())
def test_exports_master_weights_of_every_stage(saved: Any, tmp_path: Path, name: str) -> None:
    folder, found = saved
    file = tmp_path / "model.safetensors"
    zp.export(folder / name, file)
    exported = load_file(file)
    plain = Tied(seed=5)
    plain.load_state_dict(exported)  # strict: every name, tied ones too
    for key, value in plain.named_parameters():
        assert torch.equal(value.flatten(), found[name][f"{key} None"]), key
        # Frozen parameters have no master weights.
        dtype = torch.bfloat16 if "bf16" in name and not value.requires_grad and "frozen" in key else torch.float32
        assert exported[key].dtype == dtype
    assert plain.seen == found[name]["seen"] == 4
    assert torch.equal(exported["last.weight"], exported["hidden.weight"])
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_exports_other_checkpoints_and_dtypes(saved: Any, tmp_path: Path) -> None:
    folder, found = saved
    for name in ("plain.ckpt", "fsdpTrue", "fsdpFalse"):
        zp.export(folder / name, tmp_path / "model.safetensors")
        exported = load_file(tmp_path / "model.safetensors")
        assert exported.keys() == found[name].keys() and len(exported) > 5
        assert all(torch.equal(exported[key], found[name][key]) for key in exported), name
    zp.export(folder / "3-bf16-true", tmp_path / "model.safetensors", dtype=torch.float16)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.float16, torch.int64}


def test_export_refuses(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = saved
    target = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match=r"`dtype` must be a floating-point dtype or None, not torch\.int8"):
        zp.export(folder / "2-32-true", target, torch.int8)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        zp.export(folder / "nothing", target)
    for name in ("model.pt", "model"):
        with pytest.raises(ValueError, match=r"model.*: the suffix says what.*`.safetensors`.*`.ckpt`"):
            zp.export(folder / "2-32-true", tmp_path / name)
    with pytest.raises(ValueError, match=r"optimizer=True.*weights only. Use the suffix `.ckpt`"):
        zp.export(folder / "2-32-true", target, optimizer=True)
    zp.export(folder / "2-32-true", tmp_path / "weights.ckpt")
    for source in (tmp_path / "weights.ckpt", folder / "weights-only"):
        with pytest.raises(ValueError, match="has no optimizer states.*without `optimizer=True`"):
            zp.export(source, tmp_path / "model.ckpt", optimizer=True)
    os.remove(tmp_path / "weights.ckpt")
    assert not os.listdir(tmp_path)
    zp.export(folder / "2-32-true", target)
    before = target.read_bytes()

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StoredTensors, "read", fail)
    with pytest.raises(OSError, match="No space left"):
        zp.export(folder / "3-32-true", target)
    assert target.read_bytes() == before and os.listdir(tmp_path) == ["model.safetensors"]


def test_a_lightning_checkpoint_is_as_lightnings(saved: Any, tmp_path: Path) -> None:
    folder, found = saved
    plain = load_data(folder / "plain.ckpt")
    for name in _names():
        assert main(["export", str(folder / name), str(tmp_path / "model.ckpt"), "--optimizer"]) == 0
        made = load_data(tmp_path / "model.ckpt")
        assert made.keys() == plain.keys() and made["hyper_parameters"] == plain["hyper_parameters"]
        (states,), (of_plain,) = made["optimizer_states"], plain["optimizer_states"]
        wanted, groups = of_plain["state"], [group["params"] for group in of_plain["param_groups"]]
        assert [group["params"] for group in states["param_groups"]] == groups
        assert states["state"].keys() == wanted.keys()
        for number, state in states["state"].items():
            shapes = {key: value.shape for key, value in wanted[number].items()}
            assert {key: value.shape for key, value in state.items()} == shapes, (name, number)
        assert main(["export", str(folder / name), str(tmp_path / "model.ckpt"), "--dtype", "float16"]) == 0
        rebuilt = Tied.load_from_checkpoint(tmp_path / "model.ckpt")
        for key, value in rebuilt.named_parameters():
            assert torch.equal(value.flatten(), found[name][f"{key} None"].half().float()), (name, key)
        assert not {"optimizer_states", "lr_schedulers", "callbacks"} & load_data(tmp_path / "model.ckpt").keys()


def test_extra_states_of_a_lightning_checkpoint(tmp_path: Path) -> None:
    weights = {"weight": torch.ones(2), "_extra_state": {"seen": [1, 2]}, "metric.value": [torch.zeros(1)]}
    torch.save({"state_dict": weights, "pytorch-lightning_version": "2.6.0"}, tmp_path / "ddp.ckpt")
    for suffix in ("ckpt", "safetensors"):
        zp.export(tmp_path / "ddp.ckpt", tmp_path / f"out.{suffix}", torch.float16)
    exported = torch.load(tmp_path / "out.ckpt", weights_only=True)["state_dict"]
    assert exported == {**weights, "weight": exported["weight"]} and exported["weight"].dtype == torch.float16
    assert load_file(tmp_path / "out.safetensors").keys() == {"weight"}


def test_a_lightning_checkpoint_has_the_loss_scale(saved: Any, tmp_path: Path) -> None:
    zp.export(saved[0] / "scaled", tmp_path / "model.ckpt", optimizer=True)
    scale = load_data(saved[0] / "scaled" / "meta.pt")["zeroplus"]["engine"]["loss_scale"]["cur_scale"]
    scaler = torch.amp.GradScaler("cpu", init_scale=7.0)
    scaler.load_state_dict(load_data(tmp_path / "model.ckpt")["MixedPrecision"])
    assert scaler.state_dict()["scale"] == scale != 7


def test_the_command_says_why_it_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "model.ckpt")]) == 1
    assert "no checkpoint" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["export", "a", "b.ckpt", "--dtype", "float23"])
    assert "--dtype float23: there is no such dtype" in capsys.readouterr().err


def _start(cases: list[Any]) -> list[tuple[dict[str, Tensor], int]]:
    found = []
    for stage, path, precision, sharded_init in cases:
        module = Tied(seed=7, sharded_init=sharded_init)
        run = model.trainer(model.strategy(stage), max_steps=1, precision=precision)
        run.fit(module, model.loader(), ckpt_path=path)
        (metrics,) = run.test(module, model.loader(), ckpt_path=path, verbose=False)
        found.append((module.loaded, run.global_step, metrics["loss"]))
    return found


def _loss(path: str) -> float:
    module = Tied(seed=5)
    module.load_state_dict(load_file(path))
    run = model.trainer("ddp")
    (metrics,) = run.test(module, model.loader(), verbose=False)
    return metrics["loss"]


@pytest.mark.parametrize("source", ["3-32-true", "plain.ckpt"])
def test_starts_from_an_exported_file_at_every_stage(ranks2: Any, saved: Any, tmp_path: Path, source: str) -> None:
    folder, _ = saved
    file = str(tmp_path / "model.safetensors")
    zp.export(folder / source, file)
    weights = load_file(file)
    want = ranks2.run(_loss, file)[0]
    cases = [(stage, file, "32-true", False) for stage in range(4)] + [(3, file, "32-true", True)]
    for answers in ranks2.run(_start, cases):
        for loaded, step, loss in answers:
            assert step == 1, "a training of its own"
            for name in ("first.weight", "hidden.weight", "scale", "frozen.bias"):
                assert torch.equal(loaded[f"{name} None"], weights[name].flatten())
            assert loaded["seen"] == 4
            assert loss == pytest.approx(want, rel=1e-6)


def _resume_plain(path: str) -> list[dict[str, Tensor]]:
    return [fit(model.strategy(stage), 9, path, module=Tied(seed=7))[1] for stage in range(4)]


def test_resumes_a_plain_checkpoint_with_its_optimizer_state(ranks2: Any, saved: Any) -> None:
    folder, found = saved
    for answers in ranks2.run(_resume_plain, str(folder / "plain.ckpt")):
        for trained in answers:
            assert trained.keys() == found["on"].keys()
            for name, value in found["on"].items():
                assert torch.allclose(trained[name].flatten(), value.flatten().float(), rtol=0, atol=1e-6), name


def _start_fsdp(path: str) -> tuple[dict[str, Tensor], int]:
    task = fsdp.Task()
    run = fsdp.trainer(fsdp.ours(), max_steps=0)
    run.fit(task, fsdp.loader(), ckpt_path=path)
    return {name: fsdp.full(value) for name, value in task.state_dict().items()}, run.global_step


def test_fsdp_starts_from_an_exported_file(ranks2: Any, saved: Any, tmp_path: Path) -> None:
    folder, found = saved
    zp.export(folder / "fsdpTrue", tmp_path / "model.safetensors")
    for weights, step in ranks2.run(_start_fsdp, str(tmp_path / "model.safetensors")):
        assert step == 0 and all(torch.equal(weights[name], value) for name, value in found["fsdpTrue"].items())


def test_an_export_is_read_a_tensor_at_a_time(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = saved
    at_once = []
    read = StoredTensors.read

    def count(tensors: StoredTensors, fragments: list[Fragment]) -> None:
        at_once.append(len(fragments))
        read(tensors, fragments)

    monkeypatch.setattr(StoredTensors, "read", count)
    zp.export(folder / "3-32-true", tmp_path / "model.safetensors")
    assert len(at_once) >= 9 and set(at_once) == {1}
