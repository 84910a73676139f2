"""Every code block of README, CONTRIBUTING and docs is run."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from lightning_zeroplus.cli import main
from lightning_zeroplus.testing import RankError
from lightning_zeroplus.testing.simulated_cuda.__main__ import parse
from tests.docs.blocks import PAGES, ROOT, Block, blocks_of, framed
from tests.docs.runner import (
    check_tool,
    commands_of,
    missing,
    run_cli,
    run_cli_on_little_text,
    run_python,
    write_run_yaml,
)
from tests.matrix.cells import Cell
from tests.support.audited import audit
from tests.support.upstream import lightnings_strategy

BLOCKS = [block for page in PAGES if page.exists() for block in blocks_of(page)]


#: Frames whose blocks start jobs, or compile.
SLOW = ("fit_compiled", "newcomer", "test_file")

#: How many ranks a frame has, if not two.
RANKS = {"fit_hsdp": 4}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            block,
            marks=[pytest.mark.slow] * (block.frame in SLOW),
            id=f"{block.where}-{block.frame or block.language}",
        )
        for block in BLOCKS
    ],
)
def test_block(block: Block, ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if block.frame == "newcomer":
        _run_newcomer(block, ranks, tmp_path)
    else:
        run_block(block, ranks(RANKS.get(block.frame, 2)), tmp_path, capsys)


def run_block(block: Block, ranks2: Any, folder: Path, capsys: Any) -> None:
    """Run a block in its frame.

    Raises:
        AssertionError: If nobody knows how.
    """
    match block.language, block.frame:
        case "python", "test_file":
            _run_test_file(block, folder)
        case "python", _:
            ranks2.run(run_python, framed(block), block.where, str(folder))
        case "bash", "":
            for command in commands_of(block.code):
                _run_command(command, ranks2, folder, block.page)
        case "yaml", "":
            _run_config(block, ranks2, folder)
        case "text", "usage":
            _check_usage(block, capsys)
        case "text", "audit":
            _check_audit(block, ranks2)
        case "text", "tree":
            _check_tree(block)
        case language, frame:
            raise AssertionError(
                f"{block.where}: a block of {language or 'no language'!r} in the frame {frame!r} cannot be run. Give it"
                " a language, and a comment `<!-- frame: name -->` above it if it is a fragment: tests/docs/blocks.py."
            )


def _run_test_file(block: Block, folder: Path) -> None:
    """The block is a test file of the reader's."""
    (folder / "test_reader.py").write_text(block.code, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def _run_command(command: list[str], ranks2: Any, folder: Path, page: str) -> None:
    if check_tool(command, page):
        return
    match command:
        case ["python", "-m", "lightning_zeroplus", "doctor", *arguments]:
            assert main(["doctor", *arguments, "--no-smoke"]) in (0, 1)
        case ["python", "-m", "lightning_zeroplus.testing.simulated_cuda", *arguments]:
            assert parse(arguments).script == "train.py"
        case ["python", "-m", "lightning_zeroplus", *arguments] if any("examples/configs" in word for word in command):
            # The demo itself takes a minute: what it would do is printed.
            for status, printed in ranks2.run(run_cli, [*arguments, "--print_config"], str(ROOT)):
                assert status == 0 and "examples.cached_contrastive" in printed
        case ["python", "-m", "lightning_zeroplus", *arguments]:
            write_run_yaml(folder)
            for status, printed in ranks2.run(run_cli, arguments, str(folder)):
                assert status == 0, printed
        case _:
            raise AssertionError(f"`{' '.join(command)}` is neither run nor checked: tests/docs/runner.py.")


def _run_newcomer(block: Block, ranks: Any, folder: Path) -> None:
    """The first run, in order, on less data and with fewer steps; ``make demo`` has been made."""
    (folder / "examples").symlink_to(ROOT / "examples")
    less = {"data.batch_size": "16", "data.max_validation": "32"}
    less |= {"trainer.val_check_interval": "2", "trainer.num_sanity_val_steps": "0"}
    steps = iter(("2", "4"))
    for command in commands_of(block.code):
        if check_tool(command):
            continue
        if command[:2] == ["python", "-c"]:
            ranks(1).run(run_python, command[2], block.where, str(folder))
            continue
        assert command[:3] == ["python", "-m", "lightning_zeroplus"]
        devices = int(command[command.index("--trainer.devices") + 1]) if "--trainer.devices" in command else 2
        smaller = dict(less)
        if command[3] == "fit":
            smaller["trainer.max_steps"] = next(steps)
        arguments = [*command[3:], *(word for name, value in smaller.items() for word in (f"--{name}", value))]
        results = ranks(devices).run(run_cli_on_little_text, arguments, str(folder))
        assert [status for status, _ in results] == [0] * devices, results
    assert (folder / "model.safetensors").exists()
    assert next(steps, None) is None
    assert "mrr" in results[0][1]
    saved = sorted(path.name for path in (folder / "outputs").rglob("*.ckpt"))
    assert "last.ckpt" in saved and any("step=4" in name for name in saved), saved


def _run_config(block: Block, ranks2: Any, folder: Path) -> None:
    """The block is a part of a config: it has to be there in the resolved config, and to train."""
    write_run_yaml(folder)
    (folder / "part.yaml").write_text(block.code, encoding="utf-8")
    arguments = ["fit", "--config", "run.yaml", "--config", "part.yaml"]
    for status, printed in ranks2.run(run_cli, [*arguments, "--print_config"], str(folder)):
        assert status == 0 and not missing(yaml.safe_load(block.code), yaml.safe_load(printed)), printed
    assert [status for status, _ in ranks2.run(run_cli, arguments, str(folder))] == [0, 0]


def _check_usage(block: Block, capsys: Any) -> None:
    """The block is a synopsis: it has the subcommands, or the options, of ``--help``."""
    words = block.code.replace("...", "").split()
    assert words[:3] == ["python", "-m", "lightning_zeroplus"]
    subcommand = [] if words[3].startswith("{") else [words[3]]
    with pytest.raises(SystemExit), mock.patch.object(sys, "argv", ["program"]):
        main([*subcommand, "--help"])
    told = re.sub(r"\s+", " ", capsys.readouterr().out)
    if subcommand:
        options = {word.strip("[]") for word in words[4:] if word.startswith("[")}
        assert options == set(re.findall(r"\[(--[\w-]+)", told))
    else:
        (names,) = re.findall(r"{([^}]*)}", told)[:1]
        assert set(words[3].strip("{}").split(",")) == {name.strip() for name in names.split(",")} | {
            "doctor",
            "export",
            "plan",
        }


def _check_audit(block: Block, ranks2: Any) -> None:
    """The block is what the audit tells of four backwards under Lightning's strategy, shortened at ``...``."""
    (told, error), _ = ranks2.run(_told_by_audit)
    table, _, message = block.code.partition(" ...\n")
    assert table in told
    assert message.split() == f"GradientMismatchError: {error}".split()


def _told_by_audit() -> tuple[str, str | None]:
    told = io.StringIO()
    without_rich = mock.patch.dict(sys.modules, {"rich.console": None, "rich.table": None})  # narrow and plain
    with contextlib.redirect_stdout(told), without_rich:
        error = audit(Cell(2, "several"), lightnings_strategy, steps=1).error
    return told.getvalue(), error


def _check_tree(block: Block) -> None:
    """The block draws folders: what it names exists."""
    folders: list[tuple[int, Path]] = []
    for line in block.code.splitlines():
        indent = len(line) - len(line.lstrip())
        folders = [(depth, path) for depth, path in folders if depth < indent]
        path = (folders[-1][1] if folders else ROOT) / line.split()[0]
        assert path.exists(), path
        folders.append((indent, path))


# -- the tests can fail ---------------------------------------------------------------------------------------------


def test_blocks_are_found() -> None:
    assert {block.language for block in BLOCKS} >= {"python", "bash", "yaml", "text"}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len([block for block in BLOCKS if block.page == "README.md"]) * 2 == text.count("\n```")


@pytest.mark.parametrize(
    ("markdown", "problem"),
    [
        ("```python\nimport lightning_zeroplus as zp\nzp.ZeroMinusStrategy\n```", "no attribute 'ZeroMinusStrategy'"),
        (
            "<!-- frame: training_step -->\n```python\nwith self.trainer.strategy.coalesces():\n    pass\n```",
            "no attribute 'coalesces'",
        ),
        (
            "<!-- frame: training_step -->\n```python\nself.manual_backward(self.loss(batch[:2]))\n```",
            "AssertionError",
        ),
        ("<!-- frame: nowhere -->\n```python\npass\n```", "there is no frame 'nowhere'"),
        ("```yaml\ntrainer:\n  strategy: zeroplus_stage4\n```", "invalid strategy name"),
        ("```bash\nmake tea\n```", "make tea"),
        ("```bash\npip install -e .\n```", "pip"),
        ("```bash\nrm -rf build\n```", "neither run nor checked"),
        ("```\npass\n```", "cannot be run"),
        ("    pass\n", "cannot be run"),
        ("<!-- frame: tree -->\n```text\nlightning_zeroplus/\n  engines/   engines\n```", "engines"),
    ],
)
def test_a_wrong_block_fails(markdown: str, problem: str, ranks2: Any, tmp_path: Path, capsys: Any) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{markdown}\n", encoding="utf-8")
    (block,) = blocks_of(page)
    with pytest.raises((RankError, AssertionError, ValueError), match=problem):
        run_block(block, _Caught(ranks2), tmp_path, capsys)


def test_a_block_goes_on_where_the_last_has_ended(ranks2: Any, tmp_path: Path, capsys: Any) -> None:
    page = tmp_path / "page.md"
    fence = "```python\n{}\n```\n\n"
    continued = "<!-- frame: continued -->\n" + fence
    page.write_text(fence.format("a = 1") + continued.format("b = a + 1") + continued.format("assert b == 2"))
    *_, last = blocks_of(page)
    run_block(last, ranks2, tmp_path, capsys)
    with pytest.raises(RankError, match="name 'b' is not defined"):
        run_block(last._replace(before=""), _Caught(ranks2), tmp_path, capsys)


class _Caught:
    """A pool whose ranks survive an error that is the same on all of them."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks

    def run(self, function: Any, *args: Any) -> list[Any]:
        answers = self.ranks.run(_caught, function, *args)
        for _, error in answers:
            if error is not None:
                raise RankError(error)
        return [result for result, _ in answers]


def _caught(function: Any, *args: Any) -> tuple[Any, str | None]:
    try:
        return function(*args), None
    except Exception:
        return None, traceback.format_exc()
