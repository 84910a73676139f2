"""Saves in the background: training goes on, what is written is what was saved, and no failure is lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import FileSystemWriter

import lightning_zeroplus as zp
from lightning_zeroplus.checkpoint import atomic
from lightning_zeroplus.checkpoint.data_only import load_data
from tests.checkpoint import model
from tests.checkpoint.model import Tied

KINDS = (0, 1, 2, 3, "fsdp")


class _Plain(Tied):
    def on_train_start(self) -> None:
        pass


class _SavesAt(Callback):
    """Saves after some steps, and notes at every later step whether the checkpoint is there."""

    def __init__(self, path: str, *steps: int, then: Callable[[int], None] = lambda step: None) -> None:
        self.path, self.steps, self.then = path, steps, then
        self.reached = 0
        self.there: dict[int, bool] = {}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.reached = trainer.global_step
        if self.reached in self.steps:
            trainer.save_checkpoint(self.path)
        self.there[self.reached] = Path(self.path).exists()
        self.then(self.reached)


def _strategy(kind: int | str, save_async: bool = True) -> Any:
    if kind == "fsdp":
        return zp.ZeroPlusFSDPStrategy(save_async=save_async)
    return model.strategy(int(kind), save_async=save_async)


def _fit(kind: int | str, steps: int, *callbacks: Callback, save_async: bool = True, **kwargs: Any) -> Any:
    run = model.trainer(_strategy(kind, save_async), max_steps=steps, callbacks=list(callbacks), **kwargs)
    run.fit(_Plain(), model.loader())
    return run


@contextmanager
def _commit(before: Callable[[Path], None]) -> Iterator[None]:
    """Call ``before`` when a checkpoint has been written and is about to replace the old one; on rank 0."""
    commit = atomic.commit

    def committing(path: Path) -> None:
        before(path)
        commit(path)

    with patch.object(atomic, "commit", committing):
        yield


def _train_on(folder: str) -> dict[Any, dict[int, bool]]:
    found = {}
    for kind in KINDS:
        _fit(kind, 2, _SavesAt(f"{folder}/{kind}-now", 2), save_async=False)
        may_end = threading.Event()

        def hold(path: Path, may_end: threading.Event = may_end) -> None:
            assert may_end.wait(60), "the training waits for the save"

        def release(step: int, may_end: threading.Event = may_end) -> None:
            if step == 4:
                may_end.set()

        callback = _SavesAt(f"{folder}/{kind}", 2, then=release)
        with _commit(hold):
            _fit(kind, 5, callback)
        assert Path(callback.path).exists(), "the end of the fit waits for the save"
        found[kind] = callback.there
    return found


def test_training_goes_on_and_what_is_written_is_what_was_saved(ranks2: Any, tmp_path: Path) -> None:
    for rank, there in enumerate(ranks2.run(_train_on, str(tmp_path))):
        # rank 0 lets the save end after its fourth step, where rank 1 may not have looked yet
        looked = (2, 3) if rank else (2, 3, 4)
        for kind in KINDS:
            assert not any(there[kind][step] for step in looked), kind
    for kind in KINDS:
        now, later = (_content(tmp_path / name) for name in (f"{kind}-now", f"{kind}"))
        assert now.keys() == later.keys() and len(now) == 3, kind
        for name, content in now.items():
            assert str(content) == str(later[name]), (kind, name)


def _content(path: Path) -> dict[str, Any]:
    """The bytes of tensors' files; of ``meta.pt`` what it holds."""
    found: dict[str, Any] = {file.name: file.read_bytes() for file in path.glob("*.distcp")}
    rest = load_data(path / "meta.pt")
    return found | {"meta.pt": rest}


def _fail(folder: str) -> list[tuple[Any, tuple[int, ...], int, str]]:
    def fail(path: Path) -> None:
        raise OSError(28, "planned failure")

    cases: list[tuple[Any, tuple[int, ...]]] = [(1, (1, 3)), (3, (2,)), ("fsdp", (1, 3)), ("fsdp", (2,))]
    return [_failed(kind, f"{folder}/never", steps, _commit(fail)) for kind, steps in cases]


def _failed(kind: Any, path: str, steps: tuple[int, ...], failing: Any) -> tuple[Any, tuple[int, ...], int, str]:
    """A fit whose saves fail: how far it came, and what it raised."""
    callback = _SavesAt(path, *steps)
    try:
        with failing:
            _fit(kind, 4, callback)
    except (OSError, RuntimeError) as error:
        return kind, steps, callback.reached, f"{type(error).__name__}: {error}"
    return kind, steps, callback.reached, "nothing"


def test_a_failed_save_raises_on_all_ranks_at_the_next_save_or_at_the_end(ranks2: Any, tmp_path: Path) -> None:
    for answers in ranks2.run(_fail, str(tmp_path)):
        for kind, steps, reached, said in answers:
            assert said.startswith("OSError: ") and "planned failure" in said, (kind, steps)
            assert reached == (3 if steps == (1, 3) else 4), (kind, steps)
    assert os.listdir(tmp_path) == []


def _fail_to_write(folder: str, failing: int) -> list[tuple[Any, tuple[int, ...], int, str]]:
    """As :func:`_fail`, where a rank cannot write its own part; before that, a good checkpoint is there."""
    writing = FileSystemWriter.write_data

    def write(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == failing:
            raise OSError(28, "planned failure")
        return writing(*args, **kwargs)

    found = []
    for kind, steps in [(2, (1, 3)), (3, (2,)), ("fsdp", (1, 3)), ("fsdp", (2,))]:
        path = f"{folder}/{kind}"
        _fit(kind, 1, _SavesAt(path, 1))
        found.append(_failed(kind, path, steps, patch.object(FileSystemWriter, "write_data", write)))
    return found


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_its_part_fails_all(ranks2: Any, tmp_path: Path, failing: int) -> None:
    for answers in ranks2.run(_fail_to_write, str(tmp_path), failing):
        for kind, steps, reached, said in answers:
            assert (
                said.startswith("RuntimeError: ") and f"OSError on rank {failing}: [Errno 28] planned failure" in said
            ), (kind, steps)
            assert reached == (3 if steps == (1, 3) else 4), (kind, steps)
    assert sorted(os.listdir(tmp_path)) == ["2", "3", "fsdp"], "what was written is gone"
    for kind in ("2", "3", "fsdp"):
        assert load_data(tmp_path / kind / "meta.pt")["global_step"] == 1, "the checkpoint before is there"


class _Releases(Callback):
    """Lets a save end when the batch after it begins."""

    def __init__(self, may_commit: threading.Semaphore) -> None:
        self.may_commit = may_commit

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step:
            self.may_commit.release()

    def on_train_end(self, *args: Any) -> None:
        self.may_commit.release()


def _keep_one(folder: str) -> list[list[str]]:
    found: list[list[str]] = []
    may_commit = threading.Semaphore(0)

    def look(path: Path) -> None:
        # The callback has asked for the removal of the old checkpoint by now: the next batch has begun.
        assert may_commit.acquire(timeout=60)
        found.append(sorted(name for name in os.listdir(folder) if not name.startswith(".")))

    keeps = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1)
    with _commit(look):
        _fit(2, 3, _Releases(may_commit), keeps, enable_checkpointing=True)
    return found


def test_the_old_checkpoint_stays_until_the_new_one_is_complete(ranks2: Any, tmp_path: Path) -> None:
    first, _ = ranks2.run(_keep_one, str(tmp_path))
    assert first == [[], ["step=1.ckpt"], ["step=2.ckpt"]]
    assert os.listdir(tmp_path) == ["step=3.ckpt"]
