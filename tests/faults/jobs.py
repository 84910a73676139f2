"""Start a job with a fault and see how it ends: when, with which error, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.faults import job
from tests.support.forked import start, wait_until_it_says

#: Within which all ranks must have ended, or within the configured time limit of collectives.
LIMIT_S = 60.0
# An exception's last line, with or without Lightning's prefix, or what the launcher says of a rank.
_ERROR = re.compile(
    r"^(?:\[rank\d\]: )?((?:[\w.]*(?:Error|Exception|Interrupt)\b|Local rank|Detected Keyboard|terminate called).*)$",
    re.MULTILINE,
)


class Fault(NamedTuple):
    """A fault, and what the user must see of it first.

    Attributes:
        shows: A pattern of the first error; None: the job ends as if nothing had happened.
        rank: The rank that meets it; None: all.
        status: The exit status of the launching process; negative: the signal that has killed it.
        timeout: The configured time limit of collectives in seconds, where it is what ends the job.
    """

    shows: str | None
    rank: int = 1
    status: int = 1
    timeout: float | None = None


_PLANNED = "RuntimeError: planned failure"
FAULTS = {
    "forward": Fault(_PLANNED),
    "forward, rank 0": Fault(_PLANNED, rank=0),
    "backward": Fault(_PLANNED),
    "window": Fault(_PLANNED),
    "step": Fault(_PLANNED),
    "validation": Fault(_PLANNED),
    "save": Fault(_PLANNED),
    "disk full": Fault("OSError: .*No space left on device", rank=0),
    "out of memory": Fault("torch.OutOfMemoryError: out of memory"),
    "killed": Fault(r"Local rank 1 \(process \d+\) was killed by SIGKILL"),
    "killed, rank 0": Fault(None, rank=0, status=-signal.SIGKILL),
    "raises, others busy": Fault(_PLANNED),
    "raises, others busy, rank 0": Fault(_PLANNED, rank=0),
    "killed, others busy": Fault(r"Local rank 1 \(process \d+\) was killed by SIGKILL", status=128 + signal.SIGKILL),
    "stopped": Fault(r"Local rank 1 \(process \d+\) is stopped by a signal", timeout=10),
    "stopped, rank 0": Fault("RuntimeError: .*Timed out", rank=0, status=-signal.SIGKILL, timeout=10),
    "slow": Fault(None, status=0, timeout=10),
    "uneven": Fault(".*MisconfigurationException: The ranks have different numbers of training batches"),
    # Nobody can know: what is shown is that the time limit has ended a collective, or that two did not match.
    "uneven, no length": Fault(
        "RuntimeError: .*(Timed out|timeout|Connection closed)|terminate called .*gloo::EnforceNotMet", timeout=10
    ),
    "interrupted": Fault("Detected KeyboardInterrupt"),
}


class Outcome(NamedTuple):
    """How a job has ended.

    Attributes:
        seconds: From the fault until all ranks had ended.
        status: The exit status of the launching process.
        errors: What looks like an error in the output of all ranks, in its order.
        left: Processes of the job that were still there after ``LIMIT_S`` seconds.
        output: Everything that was printed.
    """

    seconds: float
    status: int
    errors: list[str]
    left: list[int]
    output: str

    def first_error_shown(self, fault: Fault) -> bool:
        """Whether the user sees first what has happened."""
        if fault.shows is None:
            return not self.errors
        return bool(self.errors) and re.match(fault.shows, self.errors[0]) is not None


def run_job(name: str, stage: int | str, folder: Path) -> Outcome:
    """Run a job of two ranks that meets the fault ``name``, and wait until all of it has ended."""
    fault = FAULTS[name]
    arguments = ["--stage", str(stage), "--folder", str(folder), "--rank", str(fault.rank)]
    arguments += ["--fault", name.removesuffix(", rank 0")]
    if fault.timeout is not None:
        arguments += ["--timeout", str(fault.timeout)]
    with tempfile.NamedTemporaryFile("r") as output:
        main = start(job.main, arguments, Path(output.name), Path(output.name))
        try:
            return _watch(main, name, fault, Path(output.name))
        finally:
            assert main.pid is not None
            _kill(main.pid)
            main.join()


def _watch(main: ForkServerProcess, name: str, fault: Fault, output: Path) -> Outcome:
    assert main.pid is not None

    def text() -> str:
        return output.read_text(errors="replace")

    event = "ready" if name == "interrupted" else "finished" if name == "slow" else "fault"
    wait_until_it_says(main, rf"{event} \| ", output)
    if name == "interrupted":
        os.killpg(main.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
        happened = time.time()
    else:
        found = re.findall(rf"^{event} \| \d+ \| ([\d.]+)$", text(), re.MULTILINE)
        assert found, f"the job has ended without the fault\n{text()}"
        happened = min(map(float, found))
    deadline = happened + max(LIMIT_S, fault.timeout or 0)
    while (main.is_alive() or _alive(main.pid)) and time.time() < deadline:
        time.sleep(0.05)
    seconds = time.time() - happened
    status = -1000 if main.exitcode is None else main.exitcode
    return Outcome(seconds, status, _ERROR.findall(text()), _alive(main.pid), text())


def _alive(session: int) -> list[int]:
    """The processes of a session that have not ended: ranks, and what they have started."""
    alive = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process.pid)
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue
    return alive


def _kill(session: int) -> None:
    for pid in _alive(session):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
