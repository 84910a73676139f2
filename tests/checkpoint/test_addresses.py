"""Checkpoints at addresses, in a store that all ranks share: whatever works with a path works there, too."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

import lightning_zeroplus as zp
from lightning_zeroplus.checkpoint.places.address import Address, files_at
from lightning_zeroplus.checkpoint.places.place import RemotePlace, place_of
from lightning_zeroplus.testing import RankPool
from tests.checkpoint import model, saving
from tests.checkpoint.model import Tied, fit, strategy
from tests.checkpoint.test_bad import Payload
from tests.checkpoint.test_kill import run_job
from tests.strategy import test_fabric_files as fabric_files
from tests.support.forkserver import fork_server
from tests.support.objects import ObjectStore, address, keys

BEFORE, AFTER = 3, 5
#: At which fraction of a save a job is killed.
_MOMENTS = [(kind, moment) for kind in ("2", "fsdp", "fsdp-file", "fabric3", "3-async") for moment in (0.3, 0.6, 0.95)]


class _Plain(Tied):
    def on_train_start(self) -> None:
        pass


def _save(folder: str, stages: list[int]) -> dict[int, Any]:
    saved = {}
    for stage in stages:
        _, before = fit(strategy(stage), BEFORE, save=address(Path(folder), f"{stage}.ckpt"))
        saved[stage] = before, fit(strategy(stage), AFTER)[1]
    return saved


def _resume(folder: str, pairs: list[tuple[int, int]]) -> dict[tuple[int, int], Any]:
    return {
        (saved, stage): fit(strategy(stage), AFTER, address(Path(folder), f"{saved}.ckpt")) for saved, stage in pairs
    }


def _difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).abs().max()) for name in want)


@pytest.mark.slow
def test_any_stage_and_number_of_ranks_to_any(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    saved = ranks(2).run(_save, str(tmp_path), [0, 1, 2, 3])[0]
    assert len([key for key in keys(tmp_path) if key.endswith(".ckpt")]) == 4
    assert len([key for key in keys(tmp_path) if key.endswith(".distcp")]) == 8, "each rank writes its parts"
    for world_size, pairs in ((2, [(0, 3), (1, 0), (2, 1)]), (1, [(3, 2)])):
        for resumed in ranks(world_size).run(_resume, str(tmp_path), pairs):
            for (source, stage), (loaded, trained) in resumed.items():
                before, after = saved[source]
                assert _difference(loaded, before) == 0, (source, stage)
                assert _difference(trained, after) <= 1e-6, (source, stage)
                assert _difference(trained, before) > 1e-3, "nothing was trained"


def _saved_and_loaded(kind: str, path: str) -> tuple[str, str, str]:
    """The bits that are saved, twice, and those that are loaded."""
    module, loader = saving.make_module(kind)
    run = saving.trainer(kind, max_steps=2)
    run.fit(module, loader)
    run.save_checkpoint(path)
    run.save_checkpoint(path)
    return saving.digest(run), *map(str, reversed(saving.load(kind, path)))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["fsdp", "fsdp-file"])
def test_fsdp(ranks: Callable[[int], RankPool], tmp_path: Path, kind: str) -> None:
    where = address(tmp_path)
    saved, loaded, step = ranks(2).run(_saved_and_loaded, kind, where)[0]
    assert saved == loaded and step == "2"
    assert [key.rpartition("/")[2] for key in keys(tmp_path)] == (
        ["last.ckpt"] if kind == "fsdp-file" else ["last.ckpt", ".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    )
    assert ranks(1).run(saving.load, kind, where) == [(2, saved)]


class _Batches(pl.Callback):
    """What there is after each batch, before the next save, when the one in the background is complete."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.there: list[list[str]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.strategy._background is not None:
            trainer.strategy._background.join()
        dist.barrier()
        found = [key.removeprefix("run/") for key in keys(self.folder) if key.endswith(".ckpt")]
        self.there.append(found)
        dist.barrier()


class _AtStart(pl.Callback):
    """The averages with which a fit begins."""

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        (ema,) = (each for each in trainer.callbacks if isinstance(each, zp.EMA))
        self.averages = {key: value.clone() for key, value in ema._averages.items()}


def _with_callbacks(kind: Any, folder: str) -> tuple[list[list[str]], bool]:
    """``ModelCheckpoint``, in the background, without frozen weights, and with an average."""
    often = ModelCheckpoint(address(Path(folder), "run"), "{step}", every_n_train_steps=1, save_last=True)
    batches, ema = _Batches(folder), zp.EMA(0.5)
    settings: dict[str, Any] = {"save_async": True, "save_frozen": False}
    own = zp.ZeroPlusFSDPStrategy(**settings) if kind == "fsdp" else strategy(kind, **settings)
    callbacks = {"callbacks": [ema, often, batches], "enable_checkpointing": True}
    run = model.trainer(own, max_steps=3, **callbacks)
    run.fit(_Plain(), model.loader())
    assert often.last_model_path == address(Path(folder), "run/last.ckpt")
    resumed = zp.ZeroPlusFSDPStrategy() if kind == "fsdp" else strategy(kind)
    again, start = zp.EMA(0.5), _AtStart()
    run = model.trainer(resumed, max_steps=4, callbacks=[again, start])
    run.fit(_Plain(), model.loader(), ckpt_path=often.last_model_path)
    assert run.global_step == again.updates == 4 and start.averages.keys() == ema._averages.keys()
    return batches.there, all(torch.equal(start.averages[key], each) for key, each in ema._averages.items())


@pytest.mark.parametrize("kind", [3, "fsdp", pytest.param(1, marks=pytest.mark.thorough)])
def test_model_checkpoint_in_the_background(ranks2: RankPool, tmp_path: Path, kind: Any) -> None:
    there, same = ranks2.run(_with_callbacks, kind, str(tmp_path))[0]
    assert there == [[], *(["last.ckpt", f"step={step}.ckpt"] for step in (1, 2))], "older ones are removed"
    assert same
    parts = [key for key in keys(tmp_path) if ".parts/" in key]
    assert len(parts) == 8, "those of two checkpoints"


def _files(kind: str, folder: str) -> list[bool]:
    """Whether the weights of a plain Lightning checkpoint, and of a safetensors file, are loaded."""
    path, answers = Path(folder), []
    source, loader = saving.make_module(kind)
    run = model.trainer("ddp", max_steps=2)
    if kind == "3":
        source.on_train_start = lambda: None
    run.fit(source, loader)
    run.save_checkpoint(path / "plain.ckpt")
    wanted = {name: value.clone() for name, value in source.state_dict().items()}
    if run.is_global_zero:
        save_file(wanted, path / "weights.safetensors")
        for name in ("weights.safetensors", "plain.ckpt"):
            fsspec.filesystem("objects").put_file(str(path / name), address(path, name))
    run.strategy.barrier()
    for name in ("plain.ckpt", "weights.safetensors"):
        module, loader = saving.make_module(kind)
        run = saving.trainer(kind, max_steps=2 if name == "plain.ckpt" else 0)
        run.fit(module, loader, ckpt_path=address(path, name))
        with zp.gathered(module):
            got = module.state_dict()
            answers.append(all(torch.equal(got[each], wanted[each]) for each in wanted))
    return answers


@pytest.mark.parametrize("kind", ["3", "fsdp"])
def test_files_of_others(ranks2: RankPool, tmp_path: Path, kind: str) -> None:
    assert ranks2.run(_files, kind, str(tmp_path)) == [[True, True]] * 2


def test_export(ranks2: RankPool, tmp_path: Path) -> None:
    where = address(tmp_path)
    saved = ranks2.run(_save, str(tmp_path), [2])[0][2][0]
    where = address(tmp_path, "2.ckpt")
    zp.export(where, tmp_path / "model.safetensors")
    zp.export(where, address(tmp_path, "there/model.safetensors"))
    zp.export(where, address(tmp_path, "model.ckpt"), optimizer=True)
    zp.export(address(tmp_path, "model.ckpt"), tmp_path / "again.safetensors")
    fsspec.filesystem("objects").get_file(address(tmp_path, "there/model.safetensors"), str(tmp_path / "copied"))
    assert (tmp_path / "copied").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    for name in ("model.safetensors", "again.safetensors"):
        exported = load_file(tmp_path / name)
        for key, value in saved.items():
            if key.endswith(" None"):
                assert torch.equal(exported[key.removesuffix(" None")].flatten().float(), value), key
    with pytest.raises(IsADirectoryError, match=r"several files at 'objects://.*2\.ckpt'"):
        zp.export(where, where)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint 'objects://.*nothing'"):
        zp.export(address(tmp_path, "nothing"), tmp_path / "model.safetensors")


def _load_raw(path: str) -> bool:
    run, _, net, _ = fabric_files._set_up(3, 1)
    want = fabric_files._net(2).state_dict()
    if run.is_global_zero:
        save_file({name: value.clone() for name, value in want.items()}, Path(path.partition("://")[2] + ".local"))
        fsspec.filesystem("objects").put_file(path.partition("://")[2] + ".local", path)
    run.barrier()
    run.load_raw(path, net)
    return fabric_files._equal(fabric_files._weights(net), list(want.values()))


def test_fabric(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    where = address(tmp_path)
    want = ranks(2).run(partial(fabric_files._save, where, 3))[0]
    for world_size in (2, 1):
        for got in ranks(world_size).run(partial(fabric_files._resume, where, 1)):
            assert fabric_files._equal(got, want, 1e-6)
    zp.export(where, tmp_path / "model.safetensors", model="model")
    assert (tmp_path / "model.safetensors").stat().st_size
    (tmp_path / "bucket.store").mkdir(exist_ok=True)
    assert ranks(2).run(_load_raw, address(tmp_path, "raw.safetensors")) == [True, True]


def _answers(cases: list[tuple[str, str]]) -> list[str]:
    answers = []
    for kind, path in cases:
        module, loader = saving.make_module(kind)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        try:
            saving.trainer(kind, max_steps=3).fit(module, loader, ckpt_path=path)
            answers.append("loaded")
        except Exception as error:
            with zp.gathered(module):
                assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
            answers.append(f"{type(error).__name__}: {error}")
    return answers


def _two(folder: str) -> None:
    for kind in ("2", "fsdp"):
        _saved_and_loaded(kind, address(Path(folder), f"{kind}.ckpt"))


#: What is done to an object of a checkpoint, by the end of its key, and what is said.
DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes | None], str]] = {
    "truncated": ("__1_0.distcp", lambda content: content[:-9], "__1_0.distcp' is truncated"),
    "missing": ("__1_0.distcp", lambda content: None, "__1_0.distcp' is missing"),
    "scratched": ("__1_0.distcp", lambda content: bytes(len(content)), "__1_0.distcp' is damaged"),
    "no-metadata": (".metadata", lambda content: None, ".metadata' is missing"),
    "half": ("meta.pt", lambda content: content[: len(content) // 2], "meta.pt' is damaged"),
    "code": ("meta.pt", lambda content: _code(), "meta.pt' contains more than data"),
}


def _code() -> bytes:
    file = io.BytesIO()
    torch.save({"zeroplus": Payload("made-by-code")}, file)
    return file.getvalue()


def test_bad(ranks2: RankPool, tmp_path: Path) -> None:
    """Every rank says what is wrong, and has touched nothing."""
    ranks2.run(_two, str(tmp_path))
    cases, wanted, store = [], [], fsspec.filesystem("objects")
    contents = {key: store.cat_file(address(tmp_path, key)) for key in keys(tmp_path)}
    for kind in ("2", "fsdp"):
        for name, (end, change, said) in DAMAGES.items():
            for key, content in contents.items():
                changed = change(content) if key.endswith(end) else content
                if changed is not None:
                    store.pipe_file(address(tmp_path, f"{name}-{key}"), changed)
            cases.append((kind, address(tmp_path, f"{name}-{kind}.ckpt")))
            wanted.append(f"RuntimeError: {said}")
        cases += [(kind, address(tmp_path, "nothing.ckpt")), (kind, "nonsense://a/last.ckpt")]
        wanted += ["FileNotFoundError: no checkpoint 'objects://", "ValueError: 'nonsense://a/last.ckpt'"]
    for (kind, path), said, *answers in zip(cases, wanted, *ranks2.run(_answers, cases), strict=True):
        for answer in answers:
            assert all(part in answer for part in said.split(": ")), (kind, path, answers)
    assert not Path("made-by-code").exists()


def _fails(folder: str) -> list[str]:
    """Rank 1 cannot write: all raise its error, and the old checkpoint stays."""
    where, said = address(Path(folder)), []
    for kind in ("3", "fsdp"):
        module, loader = saving.make_module(kind)
        run = saving.trainer(kind, max_steps=1)
        run.fit(module, loader)
        run.save_checkpoint(where)
        there = keys(Path(folder))
        dist.barrier()
        ObjectStore.before = _refuse if dist.get_rank() == 1 else None
        try:
            run.save_checkpoint(where)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        finally:
            ObjectStore.before = None
        dist.barrier()
        assert keys(Path(folder)) == there
        try:
            run.save_checkpoint("nonsense://a/last.ckpt")
        except ValueError as error:
            said.append(str(error))
        dist.barrier()
        if dist.get_rank() == 0:
            run.strategy.remove_checkpoint(where)
            assert not keys(Path(folder))
        dist.barrier()
    return said


def _refuse(said: str) -> None:
    if said.startswith("PUT"):
        raise PermissionError("Forbidden")


def test_a_rank_that_cannot_write(ranks2: RankPool, tmp_path: Path) -> None:
    answers = ranks2.run(_fails, str(tmp_path))
    assert answers[0] == answers[1] and len(answers[0]) == 4
    for forbidden, unknown in zip(answers[0][::2], answers[0][1::2], strict=True):
        assert "PermissionError on rank 1: Forbidden" in forbidden
        assert "nonsense://a/last.ckpt" in unknown


def _differing(path: str) -> str:
    """Another job saves while the ranks look: they find different parts."""
    made = saving.trainer("2").strategy
    real = RemotePlace.readable
    RemotePlace.readable = lambda self: files_at(f"{path}.parts/{dist.get_rank()}")  # type: ignore
    try:
        return str(made._readable(path))
    finally:
        RemotePlace.readable = real  # type: ignore[method-assign]


def test_all_ranks_read_the_same_save(ranks2: RankPool, tmp_path: Path) -> None:
    where = address(tmp_path)
    assert ranks2.run(_differing, where) == [f"{where}.parts/0"] * 2


def _in_memory() -> None:
    for kind in ("2", "fsdp", "fsdp-file"):
        where = f"memory://{kind}/last.ckpt"
        saved, loaded, step = _saved_and_loaded(kind, where)
        assert saved == loaded and step == "2"
        found = place_of(where).readable()
        assert isinstance(found, Address) and found.is_file() == (kind == "fsdp-file")
    module, loader = saving.make_module("fsdp")
    with pytest.raises(ValueError, match=r"`weights_only=False`.*'memory://fsdp/last.*local folder only"):
        saving.trainer("fsdp").fit(module, loader, ckpt_path="memory://fsdp/last.ckpt", weights_only=False)


def test_memory(ranks: Callable[[int], RankPool]) -> None:
    """For one process."""
    ranks(1).run(_in_memory)


def _serve(*args: Any) -> None:
    """A rank of a job: it knows the store, because this module does."""
    saving.serve(*args)


@pytest.mark.parametrize(
    ("kind", "kill_at"), [("3", 0.8), *(pytest.param(*each, marks=pytest.mark.thorough) for each in _MOMENTS)]
)
def test_a_kill_leaves_the_old_or_the_new_checkpoint(
    ranks2: RankPool, tmp_path: Path, kind: str, kill_at: float
) -> None:
    where = address(tmp_path)
    said, codes = run_job(fork_server(), saving.Job(kind, where, kill_at, 0, (0, 1)), tmp_path, _serve)
    digests = {step: bits for what, step, bits in said if what == "saving"}
    assert max(digests) == 3 and codes == [-signal.SIGKILL] * 2
    for step, bits in ranks2.run(saving.load, kind, where):
        assert step in (2, 3) and bits == digests[step]
    place_of(where).prepare()
    assert len(keys(tmp_path)) == (1 if kind == "fsdp-file" else 5), "the leftovers are gone"
    for _, bits in ranks2.run(saving.load, kind, where):
        assert bits in digests.values()
