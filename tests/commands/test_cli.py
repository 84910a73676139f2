"""The command line: configs, names, help texts, exit statuses."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from lightning_zeroplus.cli import console, main
from tests.support import forked
from tests.support.scripts import cli_classes

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "examples" / "configs").glob("*.yaml"))
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["lightning_zeroplus"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def _config(tmp_path: Path, *, strategy: Any = "auto", devices: int = 1, **init_args: Any) -> str:
    path = tmp_path / "run.yaml"
    trainer = {"accelerator": "cpu", "devices": devices, "strategy": strategy, "max_epochs": 1, **QUIET}
    model = {"class_path": "tests.support.scripts.cli_classes.Small", "init_args": init_args}
    path.write_text(yaml.safe_dump({"seed_everything": 0, "trainer": trainer, "model": model}))
    return str(path)


def _shell(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR", "PYTHONPATH"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def _printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0
    return capsys.readouterr().out


# -- configs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_of_the_demo_round_trip(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = _printed(["fit", "--config", str(path), "--print_config"], capsys)
    again = tmp_path / "printed.yaml"
    again.write_text(printed)
    assert _printed(["fit", "--config", str(again), "--print_config"], capsys) == printed
    resolved, given = yaml.safe_load(printed), yaml.safe_load(path.read_text())
    assert resolved["model"]["class_path"] == given["model"]["class_path"]
    assert resolved["trainer"]["max_steps"] == resolved["model"]["init_args"]["max_steps"] == 70
    strategy = resolved["trainer"]["strategy"]
    name = strategy["class_path"].split(".")[-1] if isinstance(strategy, dict) else strategy
    by_name = {name: name for name in ("zeroplus_stage2", "zeroplus_fsdp")} | {"ddp": "ddp_find_unused_parameters_true"}
    assert name == by_name.get(path.stem, "ZeroPlusStrategy")


_PARSES = """
import sys
from lightning.pytorch.cli import LightningCLI
import lightning_zeroplus
options = ["--trainer.logger=false", "--trainer.strategy=lightning_zeroplus.ZeroPlusStrategy"]
LightningCLI(args=[*options, "--trainer.strategy.stage=2", "--model=BoringModel"], run=False)
print("deepspeed" in sys.modules)
"""


@pytest.mark.slow
def test_parsing_leaves_the_choice_of_an_accelerator_to_the_trainer() -> None:
    """DeepSpeed settles for one when it is imported, and logs to stdout, where ``--print_config`` prints."""
    done = _shell("-c", "from lightning.pytorch.demos.boring_classes import BoringModel\n" + _PARSES)
    assert done.stdout.split() == ["False"], done.stderr[-2000:]


def test_there_is_a_config_for_each_way_to_run_the_demo() -> None:
    names = ["ddp", "zeroplus_compile", "zeroplus_fsdp", "zeroplus_stage2", "zeroplus_stage3"]
    assert [path.stem for path in CONFIGS] == names


# -- training -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fit_on_two_processes_by_class_and_by_name_in_a_users_own_cli(tmp_path: Path) -> None:
    by_class = {"class_path": "lightning_zeroplus.ZeroPlusStrategy", "init_args": {"stage": 2, "reduction": "step"}}
    ours = _shell("-m", "lightning_zeroplus", "fit", "--config", _config(tmp_path, strategy=by_class, devices=2))
    own = yaml.safe_load(Path(_config(tmp_path, strategy="zeroplus_stage3", devices=2)).read_text())
    own["model"] = own["model"]["init_args"]  # that CLI knows its model
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    theirs = forked.run(Path(cli_classes.__file__), "fit", "--config", str(tmp_path / "own.yaml"), folder=ROOT)
    totals = []
    for done in (ours, theirs):
        assert done.returncode == 0, done.stderr[-3000:]
        totals += re.findall(r"trained with ZeroPlusStrategy on 2: (-?[\d.]+) in 2", done.stdout)
    assert len(totals) == 2 and totals[0] == totals[1], totals


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_other_subcommands(subcommand: str, tmp_path: Path) -> None:
    assert main([subcommand, "--config", _config(tmp_path)]) == 0


# -- audit ----------------------------------------------------------------------------------------------------------


def test_audit_stops_after_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _config(tmp_path)
    assert main(["audit", "--config", config, "--steps", "3", "--parameters", "*.weight"]) == 0
    out = capsys.readouterr().out
    assert "3 optimizer steps: all 2 parameters agree" in out
    assert re.search(r"trained with SingleDeviceStrategy on 1: \S+ in 3\n", out), out


def test_audit_of_a_wrong_gradient_exits_with_1(tmp_path: Path) -> None:
    config = _config(tmp_path, strategy="ddp", devices=2, tampers=True)
    done = forked.run(console, "audit", "--config", config, folder=ROOT)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "1 of 4 parameters differ, most of all 'net.0.weight'" in done.stderr
    assert "Traceback" not in done.stderr
    assert "WRONG" in done.stdout


def _audit(config: str, options: list[str]) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), patch.object(sys, "argv", ["lightning_zeroplus"]):
        status = main(["audit", "--config", config, *options])
    return status, printed.getvalue()


@pytest.mark.parametrize(
    ("tampers", "verdict"), [(False, "all 4 parameters agree"), (True, "1 of 4 parameters differ")]
)
def test_audit_under_fsdp(ranks2: Any, tmp_path: Path, tampers: bool, verdict: str) -> None:
    config = _config(tmp_path, strategy="zeroplus_fsdp", devices=2, tampers=tampers)
    (status, told), (other, silent) = ranks2.run(_audit, config, ["--steps", "1"])
    assert status == other == int(tampers) and f"1 optimizer step: {verdict}" in told
    assert "parameters" not in silent


def test_audit_without_a_step_fails(tmp_path: Path) -> None:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    with pytest.raises(MisconfigurationException, match="saw no optimizer step"):
        main(["audit", "--config", _config(tmp_path), "--trainer.limit_train_batches", "0"])


# -- help and errors ------------------------------------------------------------------------------------------------


def test_help_comes_from_the_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    def plain(*arguments: str) -> str:
        return re.sub(r"\s+", " ", _printed(list(arguments), capsys))

    assert "doctor" in plain("--help") and "fit,validate,test,predict,audit" in plain("--help").replace(" ", "")
    assert "Optimizer steps to audit." in plain("audit", "--help")
    strategy = plain("fit", "--trainer.strategy.help=lightning_zeroplus.ZeroPlusStrategy")
    assert "What is sharded over the ranks." in strategy
    audit = plain("fit", "--trainer.callbacks.help=lightning_zeroplus.GradientAudit")
    assert "How many optimizer steps to audit" in audit


def test_without_jsonargparse_the_command_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    with patch("importlib.util.find_spec", return_value=None):
        assert main(["fit"]) == 2
    assert "pip install 'lightning-zeroplus[cli]'" in capsys.readouterr().err


def test_the_console_script_is_declared() -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="zeroplus")
    assert script.value == "lightning_zeroplus.cli:console"
