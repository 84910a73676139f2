"""Fits that run on the CPU with gloo, and on the simulated device, with what the device's log says of them."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zeroplus as zp
from lightning_zeroplus.testing.simulated_cuda import Log, record
from tests.support.training import trainer, zero_plus

_WIDTH = 16


class Job(NamedTuple):
    """One fit.

    Attributes:
        strategy: A stage of ZeRO, ``"fsdp"``, or ``"ddp"``.
        loop: ``"plain"``: two backwards in a step; ``"window"``: the same in a window; ``"cached"``: a cached loss;
            ``"automatic"``: automatic optimization with gradient accumulation.
        offload: Keep optimizer states on the host.
        batch_norm: With buffers that every rank has for itself until DDP's rule broadcasts them.
        dropout: The probability that a unit is dropped.
        precision: The Trainer's.
        config: Of DeepSpeed, over the defaults.
        callbacks: Names of our callbacks.
        resume: Save a checkpoint, and go on with this strategy.
    """

    strategy: int | str
    loop: str = "plain"
    offload: bool = False
    batch_norm: bool = False
    dropout: float = 0.0
    precision: Any = "32-true"
    config: tuple[tuple[str, Any], ...] = ()
    callbacks: tuple[str, ...] = ()
    resume: int | str | None = None


class Result(NamedTuple):
    """What a fit has left on one rank.

    Attributes:
        weights: All parameters and buffers of floats, as one fp32 vector on the CPU.
        moved: How far they are from where they began.
        races: The races of the log.
        counts: Of the log, in its last step: kernels, collectives, host synchronizations, events.
        synchronizations: The places of the host synchronizations in the last step.
    """

    weights: Tensor
    moved: float
    races: list[str]
    counts: dict[str, int]
    synchronizations: list[str]


class Module(pl.LightningModule):
    """A network, and its loop."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.automatic_optimization = job.loop == "automatic"
        self.job = job
        torch.manual_seed(0)
        middle: list[nn.Module] = [nn.BatchNorm1d(_WIDTH)] if job.batch_norm else []
        self.net = nn.Sequential(
            nn.Linear(_WIDTH, _WIDTH), *middle, nn.Tanh(), nn.Dropout(job.dropout), nn.Linear(_WIDTH, _WIDTH)
        )
        self.cached = zp.CachedLoss(lambda y: y.square().mean() + y.mean(0).square().sum(), chunk_size=2)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        (x,) = batch
        assert x.device == self.device and x.is_cuda == (self.trainer.strategy.root_device.type == "cuda")
        if self.job.loop == "automatic":
            return self.net(x).square().mean()
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if self.job.loop == "cached":
            self.cached(self, self.net, x)  # differentiates, too
        elif self.job.loop == "window":
            with self.trainer.strategy.coalesce():
                self._backwards(x)
        else:
            self._backwards(x)
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        return None

    def _backwards(self, x: Tensor) -> None:
        for part in x.chunk(2):
            self.manual_backward(self.net(part).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        data = torch.randn(48, _WIDTH, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(data), batch_size=4)


class _LastStep(pl.Callback):
    """Logs the last step alone: the steps before it warm up what is made once."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.recorded: Log | None = None
        self._within = ExitStack()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.steps - 1 and self.recorded is None:
            self.recorded = self._within.enter_context(record(locations=True))

    def on_train_batch_end(self, *_: Any) -> None:
        self._within.close()


def run(job: Job, accelerator: str, count: bool = False) -> Result:
    """Fit on this rank and return what is left.

    Args:
        job: The fit.
        accelerator: The Trainer's.
        count: On a simulated device: log the last step, with locations. Otherwise the whole fit, for races.
    """
    log, last = None, _LastStep(3)
    if accelerator == "cpu" or torch.version.cuda is not None:
        weights, before = _fit(job, accelerator, [])
    elif count:
        weights, before = _fit(job, accelerator, [last])
        log = last.recorded
    else:
        with record() as log:
            weights, before = _fit(job, accelerator, [])
    moved = float((weights - before).abs().max())
    if log is None:
        return Result(weights, moved, [], {}, [])
    counts = {
        "kernels": sum(log.kernels().values()),
        "collectives": sum(log.collectives().values()),
        "host synchronizations": sum(log.host_synchronizations().values()),
        "events": log.events(),
    }
    places = [
        f"{times} x {place.operation} at {place.location}" for place, times in log.host_synchronizations().items()
    ]
    return Result(weights, moved, [str(race) for race in log.races()], counts, places)


def _strategy(name: int | str, job: Job) -> Any:
    # "auto" depends on the device, and a sum of averages rounds otherwise than the average of a sum.
    settings: dict[str, Any] = {"reduction": "backward", "offload": "cpu" if job.offload else None}
    if name == "fsdp":
        return zp.ZeroPlusFSDPStrategy(**settings)
    if isinstance(name, str):
        return name
    if name < 2:
        settings["reduction"] = "auto"
    return zero_plus(name, dict(job.config), **settings)


def _fit(job: Job, accelerator: str, callbacks: list[pl.Callback]) -> tuple[Tensor, Tensor]:
    callbacks = [*callbacks, *(getattr(zp, name)() for name in job.callbacks)]
    options: dict[str, Any] = {"accelerator": accelerator, "precision": job.precision, "callbacks": callbacks}
    if (job.strategy, job.precision) == ("fsdp", "16-mixed"):  # Lightning refuses it for a strategy that is an object
        options |= {"precision": None, "plugins": [MixedPrecision("16-mixed", "cuda")]}
    if job.loop == "automatic":
        options |= {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    module = Module(job)
    before = _flat(module)
    fitting = trainer(_strategy(job.strategy, job), max_steps=3, **options)
    fitting.fit(module)
    if job.resume is not None:
        module = _resume(job, fitting, options)
    return _flat(module), before


def _resume(job: Job, fitting: pl.Trainer, options: dict[str, Any]) -> Module:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    if dist.get_backend() == "gloo":
        dist.broadcast_object_list(folder)
    else:
        dist.broadcast_object_list(folder, device=torch.device("cuda", torch.cuda.current_device()))
    path = str(Path(str(folder[0]), "last.ckpt"))
    fitting.save_checkpoint(path)
    module = Module(job)
    assert job.resume is not None
    trainer(_strategy(job.resume, job), max_steps=5, **options).fit(module, ckpt_path=path)
    return module


def _flat(module: Module) -> Tensor:
    with zp.gathered(module):
        tensors = [*module.net.parameters(), *(each for each in module.net.buffers() if each.is_floating_point())]
        return torch.cat([tensor.detach().float().cpu().flatten() for tensor in tensors]).clone()
