"""The command ``doctor``: options, report, exit status."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import groupby

from lightning_zeroplus.doctor.checks import examine
from lightning_zeroplus.doctor.finding import Finding
from lightning_zeroplus.internals.extensions import choose_extensions_folder
from lightning_zeroplus.table import print_table


def run(arguments: Sequence[str]) -> int:
    """Examine this machine and print the findings.

    Args:
        arguments: The command line after ``doctor``.

    Returns:
        The exit status: 1 if there is a problem, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lightning_zeroplus doctor",
        description="Report what this machine supports, and its problems. Exit status 1: there is a problem.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--fix", action="store_true", help="remove locks that dead processes have left")
    parser.add_argument("--no-smoke", action="store_true", help="do not train a few steps on two processes")
    options = parser.parse_args(arguments)
    choose_extensions_folder()  # the operators and locks of a fit are there
    # The output of the examined libraries does not belong to the report.
    with redirect_stdout(sys.stderr):
        findings = list(examine(fix=options.fix, smoke=not options.no_smoke))
    problems = [finding for finding in findings if finding.status == "problem"]
    if options.json:
        entries = [finding._asdict() for finding in findings]
        print(json.dumps({"ok": not problems, "findings": entries}, indent=1))
    else:
        _print(findings, problems)
    return 1 if problems else 0


def _print(findings: Sequence[Finding], problems: Sequence[Finding]) -> None:
    for section, members in groupby(findings, key=lambda finding: finding.section):
        rows = [(finding.name, finding.status, finding.detail) for finding in members]
        print_table(section, ("", "status", ""), rows)
    if not problems:
        print("no problem found")
    for problem in problems:
        print(f"problem: {problem.section}: {problem.name}: {problem.detail}")
