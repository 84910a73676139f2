"""A job that saves to the same place after every step, until it is killed in a save."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

import lightning_zeroplus as zp
from lightning_zeroplus.testing.ranks import _join, _Setup
from tests.checkpoint import model
from tests.conftest import quiet
from tests.fsdp import training as fsdp

#: What a save does to the file system, as the interpreter's audit events tell.
_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "ctypes.dlsym")


class Job(NamedTuple):
    """What each rank is told.

    Attributes:
        kind: A ZeRO stage, also with ``"fabric"`` before it, or ``"fsdp"`` or ``"fsdp-file"``; with ``"-async"`` it is
            written in the background, and with ``"-meanwhile"`` the training goes on before that ends.
        path: Where to save.
        kill_at: At which fraction of the third save, counted in what it does to the file system.
        counts: The rank whose save is counted, and that kills.
        kills: The ranks that are killed.
    """

    kind: str
    path: str
    kill_at: float
    counts: int
    kills: tuple[int, ...]


def serve(setup: _Setup, job: Job, pipe: Connection) -> None:
    """A rank of the job: says which processes there are, and before and after each save what is saved."""
    _join(setup)
    quiet()
    victims: list[Any] = [None] * setup.world_size
    torch.distributed.all_gather_object(victims, os.getpid())
    saves = _SavesMeanwhile if job.kind.endswith("-meanwhile") else _SavesEveryStep
    callback = saves(job, pipe, [victims[rank] for rank in job.kills])
    if job.kind.startswith("fabric"):
        UnderFabric(job.kind).train(4, callback)
        return
    module, loader = make_module(job.kind)
    steps = 10_000 if saves is _SavesMeanwhile else 4  # more than can be made before the kill
    trainer(job.kind, max_steps=steps, max_epochs=-1, callbacks=[callback]).fit(module, loader)


def make_module(kind: str) -> tuple[Any, Any]:
    if kind.startswith("fsdp"):
        return fsdp.Task(optimizer="adamw"), fsdp.loader()
    return model.Tied(), model.loader()


def trainer(kind: str, **kwargs: Any) -> pl.Trainer:
    save_async = kind.endswith(("-async", "-meanwhile"))
    kind = kind.removesuffix("-async").removesuffix("-meanwhile")
    if kind.startswith("fsdp"):
        own = fsdp.ours(save_distributed_checkpoint=kind == "fsdp", save_async=save_async)
        return fsdp.trainer(own, **kwargs)
    return model.trainer(model.strategy(int(kind), save_async=save_async), **kwargs)


class UnderFabric:
    """A loop under Fabric, which knows and does what is asked of a Trainer here."""

    def __init__(self, kind: str) -> None:
        zero = {"stage3_param_persistence_threshold": 6, "reduce_bucket_size": 20}
        strategy = zp.ZeroPlusFabricStrategy(int(kind.removeprefix("fabric")), config={"zero_optimization": zero})
        self.fabric = Fabric(accelerator="cpu", devices=torch.distributed.get_world_size(), strategy=strategy)
        self.fabric.launch()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(model.CLASSES, 7), nn.Tanh(), nn.Linear(7, 3))
        self.model, self.optimizer = self.fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.01))
        self.state = {"model": self.model, "optimizer": self.optimizer, "step": 0}
        self.global_rank, self.strategy = self.fabric.global_rank, self.fabric.strategy

    @property
    def global_step(self) -> int:
        return int(self.state["step"])

    def save_checkpoint(self, path: str) -> None:
        self.fabric.save(path, self.state)

    def train(self, steps: int, callback: _SavesEveryStep) -> None:
        for _ in range(steps):
            self.fabric.backward(self.model(model.samples()).square().sum())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state["step"] += 1
            callback.on_train_batch_end(self)


def load(kind: str, path: str) -> tuple[int, str]:
    """Load what was saved: the step, and the bits."""
    if kind.startswith("fabric"):
        loop = UnderFabric(kind)
        loop.fabric.load(path, loop.state)
        return loop.global_step, digest(loop)
    module, loader = make_module(kind)
    run = trainer(kind, max_steps=1)  # fewer than have been made: nothing is trained
    run.fit(module, loader, ckpt_path=path)
    return run.global_step, digest(run)


def digest(trainer: pl.Trainer | UnderFabric) -> str:
    """A hash of all bits of all weights and optimizer states, the same on all ranks."""
    module: Any = None if isinstance(trainer, UnderFabric) else trainer.lightning_module
    if isinstance(trainer, UnderFabric):
        state = model.engine_state(trainer.model._forward_module)
    elif isinstance(module, model.Tied):
        state = model.state(module)
    else:
        whole = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
        state = get_model_state_dict(module, options=whole)
        state |= get_optimizer_state_dict(module, module.optimizers(use_pl_optimizer=False), options=whole)
    found = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        found.update(name.encode() + (value.numpy().tobytes() if isinstance(value, torch.Tensor) else b""))
    return found.hexdigest()


class _SavesEveryStep(pl.Callback):
    def __init__(self, job: Job, pipe: Connection, victims: list[int]) -> None:
        self.job, self.pipe, self.victims = job, pipe, victims
        self.point = _KillPoint()
        self.events = 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        step = trainer.global_step
        self.pipe.send(("saving", step, digest(trainer)))
        here = trainer.global_rank == self.job.counts and step == 3
        with self.point.within(int(self.job.kill_at * self.events) if here else None, self.victims):
            trainer.save_checkpoint(self.job.path)
            trainer.strategy._wait_for_save()
        self.events = self.point.events  # of a save that replaces another
        self.pipe.send(("saved", step, self.events))


class _SavesMeanwhile(_SavesEveryStep):
    """Trains on while the third save is written, until it is killed: the kill waits for the next step to begin."""

    def __init__(self, job: Job, pipe: Connection, victims: list[int]) -> None:
        super().__init__(job, pipe, victims)
        self.point = _KillPoint("checkpoint")
        self.saving = ExitStack()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        step = trainer.global_step
        if step > 3:
            return
        if step > 1:
            trainer.strategy._wait_for_save()
            self.saving.close()
            self.events = self.point.events
            self.pipe.send(("saved", step - 1, self.events))
        self.pipe.send(("saving", step, digest(trainer)))
        here = trainer.global_rank == self.job.counts and step == 3
        self.saving.enter_context(
            self.point.within(int(self.job.kill_at * self.events) if here else None, self.victims)
        )
        trainer.save_checkpoint(self.job.path)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            self.pipe.send(("training", 3, 0))
            self.point.may_kill.set()


class _KillPoint:
    """Counts what this process does to the file system, and kills when it has done so much.

    Args:
        thread: The name of the thread whose doings count; None: of all.
    """

    def __init__(self, thread: str | None = None) -> None:
        self._counting = False
        self._at: int | None = None
        self._victims: list[int] = []
        self._thread = thread
        self.may_kill = threading.Event()
        self.events = 0
        if thread is None:
            self.may_kill.set()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._thread not in (None, threading.current_thread().name):
            return
        if self._counting and event in _EVENTS:
            if self.events == self._at:
                assert self.may_kill.wait(60), "the training waits for the save"
                for victim in sorted(self._victims, key=lambda pid: pid == os.getpid()):
                    with suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
            self.events += 1

    @contextmanager
    def within(self, at: int | None, victims: list[int]) -> Iterator[None]:
        self.events, self._at, self._victims, self._counting = 0, at, victims, True
        try:
            yield
        finally:
            self._counting = False
