"""Runs the blocks: Python and command lines on the two ranks of a pool, in a folder of their own."""

from __future__ import annotations

import contextlib
import importlib
import io
import linecache
import os
import re
import shlex
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import tomllib
import yaml

from tests.docs.blocks import ROOT

# -- on a rank ------------------------------------------------------------------------------------------------------


def run_python(source: str, where: str, folder: str) -> None:
    """Execute ``source`` as a program."""
    name = f"<{where}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for tracebacks
    program = types.ModuleType("program")
    sys.modules["program"] = program  # where classes that are defined in it say they are
    with _working_in(folder):
        exec(compile(source, name, "exec"), vars(program))


def run_cli_on_little_text(arguments: list[str], folder: str) -> tuple[int, str]:
    """As :func:`run_cli`; the demo mines the standard library alone."""
    importlib.import_module("examples")  # they import each other by their plain names
    mine_pairs = importlib.import_module("doc_pairs").mine_pairs
    with mock.patch.object(mine_pairs, "__defaults__", ((),)):
        return run_cli(arguments, folder)


def run_cli(arguments: list[str], folder: str) -> tuple[int, str]:
    """Run ``python -m lightning_zeroplus``; give its exit status, and what it prints."""
    from lightning_zeroplus.cli import main

    printed = io.StringIO()
    with _working_in(folder), contextlib.redirect_stdout(printed), mock.patch.object(sys, "argv", ["program"]):
        try:
            status = main(arguments)
        except SystemExit as exit_:
            status = int(exit_.code or 0)
    return status, printed.getvalue()


@contextlib.contextmanager
def _working_in(folder: str) -> Iterator[None]:
    before, path = os.getcwd(), list(sys.path)
    os.chdir(folder)
    sys.path.insert(0, "")
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path


# -- command lines --------------------------------------------------------------------------------------------------


def commands_of(code: str) -> list[list[str]]:
    """The commands of a shell block, as words."""
    joined = code.replace("\\\n", " ")
    words = (shlex.split(part, comments=True) for line in joined.splitlines() for part in line.split("&&"))
    return [command for command in words if command]


def check_tool(command: list[str], page: str = "") -> bool:
    """Check a command that takes long, or changes the environment; whether it is one.

    Args:
        command: Its words.
        page: Where it is written.

    Raises:
        AssertionError: If it names what does not exist.
    """
    match command:
        case ["make", *targets]:
            rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert targets and set(targets) <= set(rules), f"`make {' '.join(targets)}`: the Makefile has {rules}"
        case ["source", script]:
            assert script == ".venv/bin/activate" and "VENV := .venv\n" in (ROOT / "Makefile").read_text()
        case ["pip", "install", *arguments]:
            # Users install a copy, as tests/commands/test_wheel.py does; contributors what they change.
            assert ("-e" in arguments) == (page == "CONTRIBUTING.md"), command
            _check_pip(arguments)
        case ["python", "-m", "pytest", *arguments] | ["pytest", *arguments]:
            _check_pytest(arguments)
        case ["python", script, *_] if script.endswith(".py"):
            assert (ROOT / script).exists(), script
        case ["bash", script]:
            assert (ROOT / script).exists(), script
        case _:
            return False
    return True


def _check_pip(arguments: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for argument in arguments:
        if argument.startswith("."):
            assert set(re.findall(r"[\w-]+", argument)) <= set(extras), argument
        elif not argument.startswith("-"):
            assert (ROOT / argument).exists(), argument


def _check_pytest(arguments: list[str]) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = {marker.split(":")[0] for marker in settings["markers"]}
    rest = iter(arguments)
    for argument in rest:
        if argument == "-m":
            assert set(next(rest).split()) - {"not", "and", "or"} <= markers, arguments
        elif argument == "-n":
            int(next(rest))
        elif argument == "--dist":
            assert next(rest) == "loadfile"
        elif argument not in ("-q", "--thorough"):
            assert (ROOT / argument.split("::")[0]).exists(), argument


# -- configs --------------------------------------------------------------------------------------------------------


def write_run_yaml(folder: Path) -> None:
    """The reader's own ``run.yaml``."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": "zeroplus_stage2", "max_epochs": 1, **quiet}
    config = {"trainer": trainer, "model": {"class_path": "tests.docs.small.Encoded"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def missing(part: object, whole: object, at: str = "") -> list[str]:
    """Where ``part``, of a config, is not in ``whole``, the resolved config."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return [place for key in part for place in missing(part[key], whole.get(key), f"{at}.{key}")]
    return [] if part == whole else [f"{at}: {part!r} became {whole!r}"]
