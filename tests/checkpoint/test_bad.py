"""Checkpoints that cannot be loaded: every rank says so at once, names file and cause, and has touched nothing."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_zeroplus as zp
from tests.checkpoint import model, saving
from tests.checkpoint.model import Tied


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.makedirs, (self.path, 0o777, True)


def _save(kinds: list[str], folder: str) -> None:
    for kind in kinds:
        module, loader = saving.make_module(kind)
        run = saving.trainer(kind, max_steps=2)
        run.fit(module, loader)
        run.save_checkpoint(f"{folder}/{kind}")
        run.save_checkpoint(f"{folder}/{kind}-weights", weights_only=True)


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint of each kind."""
    folder = tmp_path_factory.mktemp("saved")
    ranks(2).run(_save, ["2", "3", "fsdp", "fsdp-file"], str(folder))
    return folder


def _try(cases: list[tuple[str, str, dict[str, Any]]], spoil_rank: int | None = None) -> list[tuple[str, bool]]:
    """What is said, and whether the weights are still those that the module was made with."""
    answers = []
    for kind, path, arguments in cases:
        module, loader = saving.make_module(kind)
        module = Tied(**arguments) if arguments else module
        if spoil_rank == torch.distributed.get_rank():
            path += "-not-there"
        before = {name: value.clone() for name, value in module.state_dict().items()}
        touched = _Touched(before)
        try:
            saving.trainer(kind, max_steps=3, callbacks=[touched]).fit(module, loader, ckpt_path=path)
            answers.append(("loaded", False))
        except Exception as error:
            said = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
            answers.append(("\n".join(said), touched.intact(module)))
    return answers


class _Touched(zp.ReductionMonitor):
    """Compares weights where they are whole."""

    def __init__(self, before: dict[str, Any]) -> None:
        super().__init__()
        self.before = before

    def intact(self, module: Any) -> bool:
        whole = _whole(module)
        return all(torch.equal(whole[name], value) for name, value in self.before.items() if name in whole)


def _whole(module: Any) -> dict[str, torch.Tensor]:
    with zp.gathered(module):
        return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _shard(path: Path) -> Path:
    return sorted(path.glob("*.distcp"))[-1]


def _truncate(file: Path) -> None:
    with open(file, "r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def _flip(file: Path) -> None:
    """One bit of the content of each record with more than a few bytes, where ``torch.load`` does not see it."""
    content = bytearray(file.read_bytes())
    with open(file, "rb") as opened:
        metadata = pickle.loads((file.parent / ".metadata").read_bytes())
        for stored in metadata.storage_data.values():
            if stored.relative_path == file.name:
                opened.seek(stored.offset)
                with zipfile.ZipFile(io.BytesIO(opened.read(stored.length))) as archive:
                    tensors = [each for each in archive.infolist() if each.filename.endswith("data/0")]
                    for record in tensors:
                        at = content.index(archive.read(record), stored.offset + record.header_offset)
                        content[at] ^= 1
    file.write_bytes(bytes(content))


DAMAGES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "truncated shard": (lambda path: _truncate(_shard(path)), ["distcp", "truncated"]),
    "missing shard": (lambda path: _shard(path).unlink(), ["distcp", "missing"]),
    "empty shard": (lambda path: _shard(path).write_bytes(b""), ["distcp", "truncated"]),
    "missing metadata": (lambda path: (path / ".metadata").unlink(), [".metadata", "missing"]),
    "truncated metadata": (lambda path: _truncate(path / ".metadata"), [".metadata", "damaged"]),
    "empty metadata": (lambda path: (path / ".metadata").write_bytes(b""), [".metadata", "damaged"]),
    "missing trainer state": (lambda path: (path / "meta.pt").unlink(), ["meta.pt", "missing"]),
    "empty trainer state": (lambda path: (path / "meta.pt").write_bytes(b""), ["meta.pt", "damaged"]),
    "truncated trainer state": (lambda path: _truncate(path / "meta.pt"), ["meta.pt", "damaged"]),
    "empty folder": (lambda path: [file.unlink() for file in path.iterdir()] and None, ["checkpoint", "meta.pt"]),
    "a file instead": (lambda path: (shutil.rmtree(path), path.write_bytes(b"hello"))[-1], ["torch.save"]),
    "an empty file instead": (lambda path: (shutil.rmtree(path), path.touch())[-1], ["empty"]),
    "nothing": (shutil.rmtree, ["no checkpoint"]),
}


def test_damage(ranks2: Any, saved: Path, tmp_path: Path) -> None:
    cases, wanted = [], []
    for name, (damage, words) in DAMAGES.items():
        for kind in ("2", "3", "fsdp"):
            path = tmp_path / f"{kind} {name}"
            shutil.copytree(saved / kind, path)
            damage(path)
            cases.append((kind, str(path), {}))
            wanted.append((f"{kind} {name}", [*words, *([] if "instead" in name else [path.name])]))
    for answers in ranks2.run(_try, cases):
        for (said, intact), (name, words) in zip(answers, wanted, strict=True):
            assert all(word in said for word in words), f"{name}: {said}"
            assert intact, name


def test_a_flipped_bit(ranks2: Any, saved: Path, tmp_path: Path) -> None:
    cases = []
    for kind in ("2", "3", "fsdp"):
        shutil.copytree(saved / kind, tmp_path / kind)
        _flip(_shard(tmp_path / kind))
        cases.append((kind, str(tmp_path / kind), {}))
    # With two ranks as before, one of them reads the spoiled file; the other has to hear of it.
    for answers in ranks2.run(_try, cases):
        for said, intact in answers:
            assert "damaged" in said and "checksum" in said and ".distcp" in said, said
            assert intact


def test_of_another_model_or_optimizer(ranks2: Any, saved: Path) -> None:
    cases: list[tuple[str, str, dict[str, Any]]] = []
    for kind, other in (("2", "3"), ("3", "2")):
        cases += [
            (kind, str(saved / other), {"width": 9}),
            (kind, str(saved / other), {"optimizer": "sgd"}),
            (kind, str(saved / f"{other}-weights"), {"seed": 1}),
            (kind, str(saved / "fsdp"), {"seed": 1}),
            (kind, str(saved / "fsdp-file"), {"seed": 1}),
        ]
    wanted = [
        "first.weight (7, 5) instead of (9, 5)",
        "it is the state of AdamW, not SGD",
        "save_weights_only=True",
        "not saved by `ZeroPlusStrategy`",
        "missing: first.weight",
    ]
    for answers in ranks2.run(_try, cases):
        for (said, intact), words in zip(answers, wanted * 2, strict=True):
            assert words in said and intact, said


def test_only_one_rank_sees_the_error(ranks2: Any, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a folder is on one node only."""
    for kind in ("2", "fsdp"):
        first, second = ranks2.run(_lose_file, kind, str(saved / kind))
        assert "missing" in second and "distcp" in second
        assert first.startswith(f"{second}\nRank 1 failed"), "the same error on both ranks, and where it comes from"


def _lose_file(kind: str, path: str) -> str:
    from unittest.mock import patch

    is_file = Path.is_file
    lost = torch.distributed.get_rank() == 1
    with patch.object(Path, "is_file", lambda self: is_file(self) and not (lost and self.suffix == ".distcp")):
        ((said, intact),) = _try([(kind, path, {})])
    assert intact
    return said


class _Saves(Tied):
    def __init__(self, payload: Payload) -> None:
        super().__init__()
        self.payload = payload

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = self.payload


def _poison(stage: int, path: str, proof: str) -> bool:
    run = model.trainer(model.strategy(stage), max_steps=1)
    run.fit(_Saves(Payload(proof)), model.loader())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.save_checkpoint(path)
    return run.global_rank != 0 or any("Loading will refuse" in str(each.message) for each in caught)


def _load(stage: int, path: str, weights_only: bool | None) -> str:
    try:
        run = model.trainer(model.strategy(stage), max_steps=1)
        run.fit(Tied(), model.loader(), ckpt_path=path, weights_only=weights_only)
    except RuntimeError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("place", ["trainer state", "metadata"])
def test_no_code_from_the_file(ranks2: Any, tmp_path: Path, place: str) -> None:
    path, proof = tmp_path / "checkpoint", tmp_path / "executed"
    for warned in ranks2.run(_poison, 2, str(path), str(proof)):
        assert warned
    proof.rmdir()  # Lightning copies hyperparameters, which runs it too
    if place == "metadata":
        metadata = pickle.loads((path / ".metadata").read_bytes())
        metadata.planner_data = Payload(str(proof))
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        meta = torch.load(path / "meta.pt", weights_only=False)
        del meta["extra"]
        torch.save(meta, path / "meta.pt")
        proof.rmdir()
    for said in ranks2.run(_load, 2, str(path), None):
        assert "makedirs" in said and ("weights_only=False" in said)
    assert not proof.exists()
    if place == "trainer state":
        assert ranks2.run(_load, 2, str(path), False) == ["loaded", "loaded"]
        assert proof.exists(), "the payload works, where the user allows it"


def _fail_to_save(kind: str, path: str, failing: int) -> str:
    from unittest.mock import patch

    module, loader = saving.make_module(kind)
    run = saving.trainer(kind, max_steps=3)
    run.fit(module, loader)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with patch("os.fsync", full if torch.distributed.get_rank() == failing else os.fsync):
        try:
            run.save_checkpoint(path)
        except RuntimeError as error:
            return str(error)
        except OSError as error:
            return str(error)
    return "saved"


@pytest.mark.parametrize(("kind", "failing"), [("2", 0), ("3", 1), ("fsdp", 1), ("fsdp-file", 0)])
def test_a_rank_that_cannot_write(ranks2: Any, saved: Path, tmp_path: Path, kind: str, failing: int) -> None:
    path = tmp_path / kind
    (shutil.copytree if (saved / kind).is_dir() else shutil.copy)(saved / kind, path)
    before = _content(path)
    for said in ranks2.run(_fail_to_save, kind, str(path), failing):
        assert "No space left on device" in said
    assert _content(path) == before
    assert os.listdir(tmp_path) == [kind], "what was written is gone: the disk is full"


def _content(path: Path) -> Any:
    return model.digest_of(path) if path.is_dir() else path.read_bytes()


def _keep_two(folder: str) -> list[str]:
    callback = ModelCheckpoint(folder, save_top_k=2, monitor="step", mode="max", every_n_train_steps=1, save_last=True)
    run = model.trainer(model.strategy(2), max_steps=5, callbacks=[callback], enable_checkpointing=True)
    run.fit(Tied(), model.loader())
    return sorted(os.listdir(folder))


def test_model_checkpoint_leaves_what_it_should(ranks2: Any, tmp_path: Path) -> None:
    for left in ranks2.run(_keep_two, str(tmp_path)):
        assert left == ["epoch=0-step=4.ckpt", "epoch=1-step=5.ckpt", "last.ckpt"]
