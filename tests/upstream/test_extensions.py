"""Where DeepSpeed keeps what it compiles: in a folder of the environment, unless the user names one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lightning_zeroplus.cli import main
from lightning_zeroplus.engine.upstream.jit_locks import extensions_root
from lightning_zeroplus.internals.extensions import VARIABLE, choose_extensions_folder
from lightning_zeroplus.testing.simulated_cuda import library, process
from tests.matrix.cells import Cell, run_cell
from tests.strategy.test_fabric import train as train_with_fabric


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that what a test sets is gone after it
    monkeypatch.delenv(VARIABLE)


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that can be written."""
    made = tmp_path / "environment"
    made.mkdir()
    monkeypatch.setattr(sys, "prefix", str(made))
    return made


def test_it_is_a_folder_of_the_environment(prefix: Path) -> None:
    assert choose_extensions_folder() == prefix / "torch_extensions"
    assert extensions_root() == prefix / "torch_extensions", "torch builds there"


@pytest.mark.parametrize(("value", "kept"), [("/mine", True), ("", False)])
def test_the_users_is_kept(prefix: Path, monkeypatch: pytest.MonkeyPatch, value: str, kept: bool) -> None:
    monkeypatch.setenv(VARIABLE, value)
    choose_extensions_folder()
    assert os.environ[VARIABLE] == (value if kept else str(prefix / "torch_extensions"))


def test_it_is_in_the_users_cache_where_the_environment_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = set()
    for name in ("first", "second", "first"):
        monkeypatch.setattr(sys, "prefix", str(tmp_path / "not there" / name))
        monkeypatch.delenv(VARIABLE, raising=False)
        found.add(choose_extensions_folder())
    assert len(found) == 2, "one for each environment"
    assert all(folder.parent == tmp_path / "cache" / "lightning_zeroplus" for folder in found)


def _chosen_by(fit: Callable[[], object], given: str) -> str:
    with patch.dict(os.environ, {VARIABLE: given}):
        fit()
        return os.environ[VARIABLE]


def _both(given: str) -> list[str]:
    cell = Cell(2, "several")
    return [_chosen_by(lambda: run_cell(cell), given), _chosen_by(lambda: train_with_fabric(cell), given)]


def test_a_fit_chooses_it(ranks2: Any, tmp_path: Path) -> None:
    own = str(Path(sys.prefix, "torch_extensions"))
    assert ranks2.run(_both, "") == [[own] * 2] * 2
    assert ranks2.run(_both, str(tmp_path)) == [[str(tmp_path)] * 2] * 2


def test_doctor_looks_there(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json", "--no-smoke"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    folders = [each["detail"] for each in findings if (each["section"], each["name"]) == ("operators", "folder")]
    assert folders == [str(prefix / "torch_extensions")]


def test_the_simulated_device_is_built_there(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> None:
        raise ArithmeticError(os.environ[VARIABLE])

    monkeypatch.setattr(library, "build", build)
    with pytest.raises(ArithmeticError, match=str(prefix / "torch_extensions")):
        process.SimulatedProcess(1, print, ())
