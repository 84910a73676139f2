"""Another DeepSpeed, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

OLD_VERSION = "0.19.2"

_RACES = "stream races"
_record: Callable[[str, object], None]


@pytest.fixture(autouse=True)
def _recorder(record_property: Callable[[str, object], None]) -> None:
    global _record
    _record = record_property


def note_races(engine: str, scenario: str, races: int) -> None:
    """Put what was found into the running test's report, for the summary."""
    _record(_RACES, (engine, scenario, races))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which races were found in which engine."""
    found: dict[str, dict[str, int]] = {}
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if getattr(report, "when", None) == "call":
            for engine, scenario, races in (value for name, value in report.user_properties if name == _RACES):
                scenarios = found.setdefault(engine, {})
                scenarios[scenario] = scenarios.get(scenario, 0) + races
    for engine, scenarios in sorted(found.items()):
        racing = {scenario: races for scenario, races in scenarios.items() if races}
        terminalreporter.write_line(
            f"stream races, {engine}: {sum(racing.values())} in {len(racing)} of {len(scenarios)} scenarios"
        )
        for scenario, races in racing.items():
            terminalreporter.write_line(f"  {races:4d}  {scenario}")


@pytest.fixture(scope="session")
def old_deepspeed() -> Iterator[Path]:
    """A folder with DeepSpeed 0.19.2 and nothing else, kept between runs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "lightning-zeroplus" / f"deepspeed-{OLD_VERSION}"
    if not (target / "deepspeed" / "__init__.py").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        command += ["--target", str(target), f"deepspeed=={OLD_VERSION}"]
        try:
            done = subprocess.run(
                command, env={**os.environ, "DS_BUILD_OPS": "0"}, capture_output=True, text=True, timeout=300
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"pip could not install DeepSpeed {OLD_VERSION} in five minutes")
        if done.returncode:
            pytest.skip(f"pip could not install DeepSpeed {OLD_VERSION}: {done.stderr.strip().splitlines()[-1]}")
    yield target
