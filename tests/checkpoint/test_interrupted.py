"""Ctrl-C while a checkpoint is written or read: the fit was interrupted, and has not failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from tests.checkpoint import saving

KINDS = ["1", "3", "fsdp"]


def _pressed(interrupted: int, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == interrupted:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    return call


def _saves(kind: str, path: str, interrupted: int) -> tuple[str, str, float]:
    module, loader = saving.make_module(kind)
    run = saving.trainer(kind, max_steps=2)
    run.fit(module, loader)
    run.save_checkpoint(path)
    before = max(each.stat().st_mtime_ns for each in Path(path).rglob("*"))
    write = FileSystemWriter.write_data
    with mock.patch.object(FileSystemWriter, "write_data", _pressed(interrupted, write)):
        try:
            run.save_checkpoint(path)
        except BaseException as error:
            return type(error).__name__, str(error), max(e.stat().st_mtime_ns for e in Path(path).rglob("*")) - before
    return "", "", 0


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_save(kind: str, ranks2: Any, tmp_path: Path) -> None:
    """Every rank ends as if its user had pressed the keys, and the checkpoint before is there."""
    assert ranks2.run(_saves, kind, str(tmp_path / "c"), 1) == [("KeyboardInterrupt", "", 0)] * 2


def _loads(kind: str, path: str) -> tuple[str, str]:
    module, loader = saving.make_module(kind)
    run = saving.trainer(kind, max_steps=2)
    run.fit(module, loader)
    run.save_checkpoint(path)
    run = saving.trainer(kind, max_steps=4)
    read = FileSystemReader.read_data
    with mock.patch.object(FileSystemReader, "read_data", _pressed(dist.get_rank(), read)), pytest.raises(SystemExit):
        run.fit(saving.make_module(kind)[0], loader, ckpt_path=path)
    return type(run.state.status).__name__, run.state.status.value


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_load(kind: str, ranks2: Any, tmp_path: Path) -> None:
    assert ranks2.run(_loads, kind, str(tmp_path / "c")) == [("TrainerStatus", "interrupted")] * 2
