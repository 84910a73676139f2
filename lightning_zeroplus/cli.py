"""The command line: Lightning's CLI with the strategies registered, and ``audit``, ``plan``, ``export``, ``doctor``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

_PROGRAM = "python -m lightning_zeroplus"

if TYPE_CHECKING:
    from lightning_zeroplus.auditing_cli import AuditingCLI


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``fit``, ``validate``, ``test``, ``predict``, ``audit``, ``plan``, ``export`` or ``doctor``.

    Args:
        arguments: The command line after the program's name; None takes the command line of the process.

    Returns:
        The exit status: 0; 1 if ``audit`` found wrong gradients, ``doctor`` a problem, ``export`` wrote nothing, or
        ``plan`` nothing that fits; 2 if a package is missing.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["doctor"]:
        from lightning_zeroplus.doctor import run

        return run(given[1:])
    if given[:1] == ["export"]:
        from lightning_zeroplus.exporting_cli import run as run_export

        return run_export(given[1:])
    if importlib.util.find_spec("jsonargparse") is None:
        print(
            f"`{_PROGRAM} {' '.join(given[:1])}` reads its configuration with jsonargparse, which is not installed."
            " Install it with: pip install 'lightning-zeroplus[cli]'",
            file=sys.stderr,
        )
        return 2
    if "" not in sys.path:
        sys.path.insert(0, "")  # find the classes that a config names in the working directory, as `python -m` does
    if given[:1] == ["plan"]:
        from lightning_zeroplus.planning_cli import run as run_plan

        return run_plan(given[1:])
    from lightning_zeroplus.callbacks.audit.report import GradientMismatchError

    try:
        _run(None if arguments is None else given)
    except GradientMismatchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _run(arguments: list[str] | None) -> AuditingCLI:
    from lightning_zeroplus.auditing_cli import AuditingCLI, AuditingTrainer, SaveConfigWithLogs

    return AuditingCLI(
        trainer_class=AuditingTrainer,
        save_config_callback=SaveConfigWithLogs,
        parser_kwargs={
            "prog": _PROGRAM,
            "description": "Train with ZeRO. Besides the subcommands below, `plan` says which strategy fits, `export`"
            " writes a checkpoint to one file, and `doctor` says what this machine can do.",
        },
        args=arguments,
    )


def console() -> None:
    """The console script ``zeroplus``."""
    sys.exit(main())
