"""Ranks for tests of distributed code: they are started once and run many functions.

Starting a process, importing torch, Lightning and DeepSpeed, and joining a process group takes seconds. A call on
running ranks takes milliseconds. To Lightning a pool's processes look like ranks of torchrun, so a
``Trainer(devices=world_size)`` runs inside them.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, TextIO, get_args

import torch
import torch.distributed as dist
from typing_extensions import Self

from lightning_zeroplus.testing.simulated_cuda.process import SimulatedProcess

# How long the other ranks may take to answer after one has failed, before they count as stuck in a collective.
_GRACE_S = 2.0
_STACK_DUMP_S = 2.0
_LONGEST_S = 366 * 24 * 3600.0  # torch counts in nanoseconds, and stops at some centuries


class RankError(RuntimeError):
    """A function raised, hung or died on some rank. The message lists dead ranks first, then errors by time."""


class _Answer(NamedTuple):
    rank: int
    time: float
    result: Any
    error: str | None


Device = Literal["cpu", "cuda", "simulated_cuda"]


class RankPool:
    """Ranks on this machine: on its CPU, with Gloo, on its GPUs, with NCCL, or on simulated GPUs, with NCCL's rules.

    Use it as a context manager, or call :meth:`close`. The processes start with the first :meth:`run`, and start anew
    after a failure, because a rank that failed may have left the others in a collective.

    Args:
        world_size: The number of ranks.
        timeout: The time limit of each function and of each collective, in seconds.
        initializer: Called without arguments on every new rank, for example to silence a logger.
        mp_context: The ``multiprocessing`` context that starts the processes; None: ``"spawn"``. A ``"forkserver"``
            that has imported the ranks' modules (``set_forkserver_preload``) starts them faster.
        device: ``"cpu"``; ``"cuda"``: real GPUs; or ``"simulated_cuda"``: each rank has ``world_size`` CUDA devices,
            and its own is current. See ``lightning_zeroplus.testing.simulated_cuda``. It starts processes in its own
            way and takes no ``mp_context``. In both cases ``Trainer(accelerator="cuda", devices=world_size)`` runs
            inside. If there are fewer GPUs than ranks, several ranks share one. Each is a node of its own then, for
            ``Trainer(accelerator="cuda", devices=1, num_nodes=world_size)``, and NCCL sends through sockets: slow,
            but it shows whether a loop is right.

    Raises:
        ValueError: If an argument has a wrong type or value; no process has been started.
        RuntimeError: From the first :meth:`run`, with ``device="cuda"``, if torch sees no GPU.
        SimulatedCudaError: From the first :meth:`run`, if there can be no simulated device here.

    Example::

        def total(value):
            tensor = torch.tensor([value + torch.distributed.get_rank()])
            torch.distributed.all_reduce(tensor)
            return tensor.item()

        with RankPool(2) as ranks:
            assert ranks.run(total, 10) == [21, 21]
    """

    def __init__(
        self,
        world_size: int,
        timeout: float = 60.0,
        initializer: Callable[[], None] | None = None,
        mp_context: BaseContext | None = None,
        device: Device = "cpu",
    ) -> None:
        if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
            raise ValueError(f"`world_size` must be an integer of at least 1, not {world_size!r}.")
        if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not 0 < timeout < _LONGEST_S:
            raise ValueError(f"`timeout` must be a positive number of seconds, at most a year, not {timeout!r}.")
        if initializer is not None and not callable(initializer):
            raise ValueError(f"`initializer` must be a function without arguments, or None, not {initializer!r}.")
        if device not in get_args(Device):
            raise ValueError(f"`device` must be one of {get_args(Device)}, not {device!r}.")
        if device == "simulated_cuda" and mp_context is not None:
            raise ValueError(
                f"`mp_context` must be None with `device={device!r}`, not {mp_context!r}: such ranks load the device"
                " before torch, which no context of `multiprocessing` can do. Leave `mp_context` out."
            )
        methods = ("spawn", "forkserver")
        if mp_context is not None and getattr(mp_context, "get_start_method", lambda: None)() not in methods:
            raise ValueError(
                f"`mp_context` must be None, or the result of `multiprocessing.get_context` for one of {methods}, not"
                f" {mp_context!r}: a process forked from this one would inherit its process group and its locks."
            )
        self.world_size = world_size
        self.timeout = timeout
        self.device = device
        self._initializer = initializer
        self._context = multiprocessing.get_context("spawn") if mp_context is None else mp_context
        self._processes: list[BaseProcess | SimulatedProcess] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None
        self._stacks: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Call ``function(*args)`` on every rank and return the results in rank order.

        Args:
            function: A picklable function. It gets its rank from ``torch.distributed.get_rank()``.
            *args: Picklable arguments, the same for every rank.
            timeout: Time limit of the function in seconds; None: the pool's.

        Returns:
            The result of each rank.

        Raises:
            RankError: If the function raised, hung or died on some rank. The pool can be used again.
        """
        task = pickle.dumps((function, args))
        if not self._processes:
            self._start()
        for rank in range(self.world_size):
            try:
                self._pipes[rank].send_bytes(task)
            except OSError:
                pass  # the rank is dead; _collect() finds its sentinel
        answers, problems = self._collect(time.monotonic() + (self.timeout if timeout is None else timeout))
        if not problems:
            return [answers[rank].result for rank in range(self.world_size)]
        self.close()
        raise RankError("\n\n".join(problems))

    def _collect(self, deadline: float) -> tuple[dict[int, _Answer], list[str]]:
        answers: dict[int, _Answer] = {}
        died: dict[int, str] = {}
        waiting: dict[Any, int] = {}
        for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True)):
            waiting[pipe] = waiting[process.sentinel] = rank
        failed = False
        while len(answers) + len(died) < self.world_size:
            left = max(deadline - time.monotonic(), 0)
            ready = multiprocessing.connection.wait(list(waiting), min(left, _GRACE_S) if failed else left)
            if not ready:
                break
            for item in ready:
                rank = waiting[item]
                if rank in answers or rank in died:
                    continue
                try:
                    answers[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                    failed = failed or answers[rank].error is not None
                except (EOFError, OSError):
                    self._processes[rank].join(1)
                    died[rank] = f"rank {rank} died with exit code {self._processes[rank].exitcode}"
                    failed = True
            waiting = {item: rank for item, rank in waiting.items() if rank not in answers and rank not in died}
        return answers, self._problems(answers, died)

    def _problems(self, answers: dict[int, _Answer], died: dict[int, str]) -> list[str]:
        raised = sorted((a for a in answers.values() if a.error is not None), key=lambda a: a.time)
        # Dead ranks first: their death makes the collectives of the others fail.
        problems = list(died.values()) + [f"rank {a.rank} raised\n{a.error}" for a in raised]
        stuck = [rank for rank in range(self.world_size) if rank not in answers and rank not in died]
        why = "did not answer after the failure above" if problems else "did not answer in time"
        return problems + [f"rank {rank} {why}\n{self._stack(rank)}" for rank in stuck]

    def _stack(self, rank: int) -> str:
        assert self._stacks is not None
        path = Path(self._stacks.name, str(rank))
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        deadline, text, before = time.monotonic() + _STACK_DUMP_S, "", None
        while time.monotonic() < deadline and not (text == before and text.endswith("\n")):  # it is being written
            multiprocessing.connection.wait([self._processes[rank].sentinel], 0.05)
            before, text = text, path.read_text() if path.exists() else ""
        return text or "(no stack)"

    def _start(self) -> None:
        gpus = torch.cuda.device_count() if self.device == "cuda" else 0
        if self.device == "cuda" and not gpus:
            raise RuntimeError('`RankPool(device="cuda")` needs a GPU, and torch sees none. Use "simulated_cuda".')
        self._stacks = tempfile.TemporaryDirectory()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            stack_file = str(Path(self._stacks.name, str(rank)))
            setup = _Setup(rank, self.world_size, self._store.port, self.timeout, stack_file, self.device, gpus)
            if self.device != "simulated_cuda":
                self._start_in_context(setup)
            else:
                process = SimulatedProcess(self.world_size, _serve, (setup, self._initializer))
                self._pipes.append(process.pipe)
                self._processes.append(process)

    def _start_in_context(self, setup: _Setup) -> None:
        ours, theirs = self._context.Pipe()
        # In typeshed BaseContext has no Process; its subclasses do.
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(setup, self._initializer, theirs), daemon=True
        )
        process.start()
        theirs.close()
        self._pipes.append(ours)
        self._processes.append(process)

    def close(self) -> None:
        """Kill the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()  # SIGTERM may not reach a rank that hangs in a collective
        for process in self._processes:
            process.join()
        self._processes, self._pipes, self._store = [], [], None
        if self._stacks is not None:
            self._stacks.cleanup()
            self._stacks = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Setup(NamedTuple):
    rank: int
    world_size: int
    port: int
    timeout: float
    stack_file: str
    device: Device
    #: Real ones of this machine.
    gpus: int


def _serve(setup: _Setup, initializer: Callable[[], None] | None, pipe: Connection) -> None:
    with open(setup.stack_file, "w") as stack_file:
        _write_stacks_on_request(stack_file)
        _join(setup)
        if initializer is not None:
            initializer()
        while True:
            try:
                task = pipe.recv_bytes()
            except (EOFError, OSError, KeyboardInterrupt):
                return  # the pool is closed, or its process is gone
            pipe.send_bytes(_answer(setup.rank, task))


def _write_stacks_on_request(file: TextIO) -> None:
    """Write the stacks of all threads to ``file`` on SIGUSR1, as long as this process lives.

    Lightning ends a fit by putting back each handler that ``signal`` knew before it. ``signal`` does not know
    ``faulthandler``, so SIGUSR1 would end the process from then on. No later hang would be shown with its stack.
    """
    set_handler = signal.signal

    def register() -> None:
        faulthandler.unregister(signal.SIGUSR1)  # otherwise it takes itself for the handler that is installed
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)

    def set_or_register(signalnum: int, handler: Any) -> Any:
        before = set_handler(signalnum, handler)
        if signalnum == signal.SIGUSR1 and handler == signal.SIG_DFL:
            register()
        return before

    register()
    signal.signal = set_or_register


def _join(setup: _Setup) -> None:
    # The variables of torchrun, with which Lightning starts no processes of its own.
    os.environ.update(
        {
            "TORCHELASTIC_RUN_ID": "rank-pool",
            "RANK": str(setup.rank),
            "LOCAL_RANK": str(setup.rank),
            "WORLD_SIZE": str(setup.world_size),
            "LOCAL_WORLD_SIZE": str(setup.world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(setup.port),
        }
    )
    if setup.device == "cuda":
        os.environ["DS_ACCELERATOR"] = "cuda"  # nothing has imported DeepSpeed yet
        if setup.gpus < setup.world_size:
            _share_gpu(setup)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", setup.port, is_master=False)
    if setup.device != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "gloo" if setup.device == "cpu" else "nccl",
        store=store,
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=timedelta(seconds=setup.timeout),
    )


def _share_gpu(setup: _Setup) -> None:
    # NCCL refuses two ranks of one host on one device. Ranks of two hosts reach each other through sockets.
    os.environ.update(
        {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(setup.rank),
            "CUDA_VISIBLE_DEVICES": str(setup.rank % setup.gpus),
            "NCCL_HOSTID": f"rank {setup.rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
        }
    )


def _answer(rank: int, task: bytes) -> bytes:
    try:
        function, args = pickle.loads(task)
        return pickle.dumps(_Answer(rank, 0.0, function(*args), None))
    except BaseException:  # a rank reports any exception, SystemExit too, and keeps running
        return pickle.dumps(_Answer(rank, time.time(), None, traceback.format_exc()))
