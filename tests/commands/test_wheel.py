"""`pip install .`: the package is whole without the repository, in an environment and a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import tomllib

from tests.docs.blocks import ROOT, blocks_of
from tests.docs.runner import commands_of

pytestmark = pytest.mark.slow

_FIT = """
import os

import lightning_zeroplus as zp
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn


class Tiny(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=4)


if __name__ == "__main__":
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(strategy="zeroplus_stage3", accelerator="cpu", devices=2, max_steps=2, **off)
    trainer.fit(Tiny())
    trainer.save_checkpoint("last.ckpt")
    line = f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps of {zp.__file__}"
    os.write(1, (line + chr(10)).encode())  # in one piece: the ranks share the output
"""

#: The ignore is used if mypy finds the error, and an error by itself if the package has no types.
_TYPED = """
import lightning_zeroplus as zp

average: zp.EMA = zp.EMA(0.99, warmup=10)
wrong = zp.EMA("0.99")  # type: ignore[arg-type]
strategy = zp.ZeroPlusStrategy(stage=2, reduction="step")
"""

#: What is imported from the packages that this one needs is none of this test.
_MYPY = """
[mypy]
warn_unused_ignores = true
[mypy-torch.*,lightning.*,deepspeed.*,torchmetrics.*,safetensors.*]
follow_imports = skip
"""


class Installed(NamedTuple):
    """The package in an environment of its own.

    Attributes:
        python: The interpreter of the environment.
        wheel: What was installed.
        folder: A folder that is not the repository, and had nothing in it.
    """

    python: Path
    wheel: Path
    folder: Path

    def run(self, *command: str) -> str:
        """Run Python there, and return what it printed."""
        return _run([str(self.python), *command], self.folder, _environment())


def _environment() -> dict[str, str]:
    """Without what leads to this repository, or to what was compiled for it."""
    hidden = ("PYTHONPATH", "TORCH_EXTENSIONS_DIR", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in hidden and not name.startswith("PYTEST_")}
    return kept | {"OMP_NUM_THREADS": "1"}


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """What the first command of the README installs; what it needs is that of this environment."""
    first, *_ = [command for block in blocks_of(ROOT / "README.md") for command in commands_of(block.code)]
    assert first == ["pip", "install", "."]
    made = tmp_path_factory.mktemp("installed")
    pip, offline = [sys.executable, "-m", "pip"], ["--no-index", "--no-deps", "--disable-pip-version-check"]
    wheels = ["wheel", "--no-build-isolation", "--wheel-dir", str(made), "."]
    _run([*pip, *wheels, *offline], ROOT, dict(os.environ))
    (wheel,) = made.glob("*.whl")
    venv.create(made / "environment", symlinks=True)
    python = made / "environment" / "bin" / "python"
    _run([*pip, "--python", str(python), "install", *offline, str(wheel)], made, dict(os.environ))
    own = _run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], made, _environment())
    # Only this folder becomes visible: a `.pth` file in it, as of an editable install, is not read.
    Path(own.strip(), "needed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (made / "empty").mkdir()
    return Installed(python, wheel, made / "empty")


@pytest.fixture(scope="module")
def trained(installed: Installed) -> str:
    (installed.folder / "fit.py").write_text(_FIT)
    return installed.run("fit.py")


def test_it_trains_on_two_ranks(installed: Installed, trained: str) -> None:
    lines = sorted(line for line in trained.splitlines() if line.startswith("rank"))
    assert [line.split(" steps of ")[0] for line in lines] == ["rank 0 of 2: 2", "rank 1 of 2: 2"]
    for line in lines:
        assert Path(line.split(" steps of ")[1]).is_relative_to(installed.python.parents[1]), "the repository's"


def test_it_exports(installed: Installed, trained: str) -> None:
    installed.run("-m", "lightning_zeroplus", "export", "last.ckpt", "model.safetensors")
    read = "from safetensors.torch import load_file; print(*sorted(load_file('model.safetensors')))"
    assert installed.run("-c", read).split() == ["net.bias", "net.weight"]


def test_doctor_finds_it(installed: Installed) -> None:
    report = json.loads(installed.run("-m", "lightning_zeroplus", "doctor", "--json", "--no-smoke"))
    versions = {each["name"]: each["detail"] for each in report["findings"] if each["section"] == "versions"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert report["ok"] and versions["lightning-zeroplus"] == project["version"]
    assert installed.wheel.name.startswith(f"lightning_zeroplus-{project['version']}-")


def _license(name: str) -> bool:
    return name.endswith(".dist-info/licenses/LICENSE")


def _native(name: str) -> bool:
    return name.startswith("lightning_zeroplus/testing/simulated_cuda/native/")


@pytest.mark.parametrize(
    ("is_one", "count"),
    [
        ("lightning_zeroplus/py.typed".__eq__, 1),
        (_license, 1),
        (_native, len(list((ROOT / "lightning_zeroplus/testing/simulated_cuda/native").iterdir()))),
    ],
    ids=["py.typed", "licence", "native"],
)
def test_the_wheel_has_what_is_not_python(installed: Installed, is_one: Callable[[str], bool], count: int) -> None:
    assert sum(map(is_one, zipfile.ZipFile(installed.wheel).namelist())) == count >= 1


def test_the_wheel_has_the_package_alone(installed: Installed) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(installed.wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lightning_zeroplus"}


def test_mypy_knows_its_types(installed: Installed) -> None:
    (installed.folder / "mine.py").write_text(_TYPED)
    (installed.folder / "mypy.ini").write_text(_MYPY)
    command = [sys.executable, "-m", "mypy", "--python-executable", str(installed.python), "mine.py"]
    assert "Success" in _run(command, installed.folder, _environment())
