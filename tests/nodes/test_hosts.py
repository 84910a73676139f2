"""Two hosts: the same weights as on one, however they were started, over a good wire and a bad one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nodes.hosts import DEVICE, Hosts, HostsUnavailableError
from tests.nodes.job import train

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STAGES = [0, 1, 2, 3]
_JOB_S = 300.0
_PORT = "29500"  # in a namespace of its own


@contextmanager
def _hosts(**kwargs: Any) -> Iterator[Hosts]:
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(**kwargs))
        except HostsUnavailableError as error:
            pytest.skip(str(error))
        yield hosts


def _start(hosts: Hosts, launch: str, output: Path, *arguments: str) -> list[subprocess.Popen[bytes]]:
    """Start the job on both hosts: by ``torchrun``, or as ``python job.py`` with Lightning's variables."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": DEVICE}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "DS_ACCELERATOR"):
        base.pop(name, None)
    jobs = []
    for host in range(2):
        environment, command = base, [sys.executable, "-m", "tests.nodes.job", *arguments]
        if launch == "torchrun":
            where = (f"--master-addr={hosts.address(0)}", f"--master-port={_PORT}", f"--node-rank={host}")
            run = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *where]
            command = [*run, "-m", "tests.nodes.job", *arguments]
        else:
            where_ = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": _PORT, "NODE_RANK": str(host)}
            environment = base | where_
        with open(output.with_suffix(f".{host}"), "wb") as file:
            jobs.append(
                subprocess.Popen(
                    hosts.command(host, *command), cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
                )
            )
    return jobs


def _text(output: Path) -> str:
    return "\n".join(output.with_suffix(f".{host}").read_text() for host in range(2))


@pytest.fixture(scope="module")
def on_one_host(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return ranks(2).run(train, str(tmp_path_factory.mktemp("one")), STAGES, timeout=_JOB_S)[0]


@pytest.mark.parametrize(
    ("launch", "delay", "loss"),
    [
        ("torchrun", 0.0, 0.0),
        ("lightning", 0.005, 0.01),
        pytest.param("torchrun", 0.02, 0.02, marks=pytest.mark.every_cell),
        pytest.param("lightning", 0.0, 0.0, marks=pytest.mark.thorough),
    ],
)
def test_two_hosts_train_and_resume_as_one(
    launch: str, delay: float, loss: float, on_one_host: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    with _hosts(delay=delay, loss=loss) as hosts:
        jobs = _start(hosts, launch, output, "--folder", str(tmp_path), *(f"--stage={stage}" for stage in STAGES))
        statuses = [job.wait(_JOB_S) for job in jobs]
        if hosts.wire is not None:
            assert hosts.wire.lost > 0 and hosts.wire.passed > 1000  # the bytes did go over the wire
    assert statuses == [0, 0], _text(output)
    results = torch.load(tmp_path / "results.pt")
    assert results.keys() == on_one_host.keys() and len(results) == 3 * len(STAGES)
    for name, want in on_one_host.items():
        assert torch.equal(results[name], want), name


def test_a_cut_wire_ends_the_job_at_the_configured_time_limit(tmp_path: Path) -> None:
    """Nobody is told that the other host is gone: only the time limit can tell."""
    limit, output = 20.0, tmp_path / "output"
    with _hosts(delay=0.001) as hosts:
        assert hosts.wire is not None
        jobs = _start(hosts, "lightning", output, "--folder", str(tmp_path), f"--endless={limit}")
        deadline = time.monotonic() + _JOB_S
        while not (tmp_path / "training").exists():
            assert time.monotonic() < deadline and all(job.poll() is None for job in jobs), _text(output)
            time.sleep(0.05)
        hosts.wire.cut.set()
        started = time.monotonic()
        statuses = [job.wait(_JOB_S) for job in jobs]
        seconds = time.monotonic() - started
    assert statuses == [1, 1], _text(output)
    assert limit - 2 <= seconds <= limit + 30, _text(output)
    # The second message is that of a rank with two collectives in flight, from the one that it waits for: gloo closes
    # the connection when the other has timed out.
    says = r"RuntimeError: .*(Timed out waiting 20000ms|Application timeout caused pair closure)"
    assert re.search(says, _text(output)), _text(output)
    assert "at most 0:00:20, the strategy's `timeout`" in _text(output), _text(output)


def test_namespaces_are_removed_whatever_happens() -> None:
    with pytest.raises(KeyError), _hosts(delay=0.001) as hosts:
        inside = subprocess.Popen(hosts.command(0, "sleep", "600"))
        while hosts.names[0] not in (names := _namespaces()):
            time.sleep(0.01)
        assert set(hosts.names) <= set(names)
        raise KeyError
    assert not set(hosts.names) & set(_namespaces())
    assert inside.wait(10) == -9


def _namespaces() -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in done.stdout.splitlines()]
