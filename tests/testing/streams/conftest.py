"""What was found, for the summary."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
