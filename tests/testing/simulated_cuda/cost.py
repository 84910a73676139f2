"""What a training step costs a device: kernels, collectives, waits of the host, events and memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zeroplus as zp
from lightning_zeroplus.testing.simulated_cuda import Log, record
from tests.gpu.profile import Profile, profile
from tests.support.training import trainer, zero_plus


class Case(NamedTuple):
    """A training step.

    Attributes:
        strategy: A stage of ZeRO, ``"fsdp"``, ``"ddp"``, or None: plain torch on each rank, without any strategy.
        backwards: Their number.
        window: Reduce once for all of them.
        clip: Clip the norm of the gradient.
        layers: The number of linear layers. There are twice as many parameters, and one.
        width: The number of features.
        precision: The Trainer's.
        config: Of DeepSpeed, over the defaults.
        audit: Audit every step.
    """

    strategy: int | str | None
    backwards: int = 2
    window: bool = False
    clip: bool = False
    layers: int = 4
    width: int = 16
    precision: Any = "32-true"
    config: dict[str, Any] | None = None
    audit: bool = False


class Cost(NamedTuple):
    """What one step of rank 0 costs, after two others.

    Attributes:
        kernels: The number of kernels, without collectives, in all backwards and in the step.
        collectives: The same of collectives.
        waits_in_backwards: How often the host waits for the device from the first forward to the last backward.
        waits_in_step: The same for clipping, the step and ``zero_grad()``.
        events: How often an event is recorded.
        peak_bytes: The most bytes that are allocated at a time.
        bytes_before: The bytes that are allocated when the step begins.
        places: Where the host waits.
        held_back: How often, besides, DeepSpeed lets the host wait for an event of three collectives ago: so that the
            host, and the memory that it allocates, does not run ahead of the device.
    """

    kernels: int
    collectives: int
    waits_in_backwards: int
    waits_in_step: int
    events: int
    peak_bytes: int
    bytes_before: int
    places: tuple[str, ...]
    held_back: int


class _Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(case.width, case.width) for _ in range(case.layers))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.scale).square().mean()


class _Module(pl.LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.case, self.net, self.last_step = case, _Net(case), 2
        self.logs: list[Log | Profile] = []
        self.peak = self.before = 0

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        with self.measured(index):
            window = self.trainer.strategy.coalesce() if self.case.window else nullcontext()
            with window:
                for part in batch[0].chunk(self.case.backwards):
                    self.manual_backward(self.net(part))
        with self.measured(index):
            if self.case.clip:
                self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
        self.peak = torch.cuda.max_memory_allocated()

    @contextmanager
    def measured(self, index: int) -> Iterator[None]:
        """Log what happens within, in the last batch."""
        if index != self.last_step:
            yield
            return
        if not self.logs:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        with record(locations=True) if torch.version.cuda is None else profile() as log:
            yield
        self.logs.append(log)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=True)

    def train_dataloader(self) -> DataLoader[Any]:
        rows = 2 * self.case.backwards  # a rank's batch
        return DataLoader(TensorDataset(torch.ones(6 * rows, self.case.width)), batch_size=rows)


def measure(case: Case) -> Cost:
    """Train three steps on this rank; the cost of the third."""
    module = _Module(case)
    if case.strategy is None:
        _train_without_strategy(module)
    else:
        # `precision` keeps the batches on the device in the dtype of the weights, as Lightning does.
        callbacks: list[pl.Callback] = [zp.GradientAudit(steps=3)] if case.audit else []
        trainer(_strategy(case), max_steps=3, accelerator="cuda", precision=case.precision, callbacks=callbacks).fit(
            module
        )
    backwards, step = module.logs
    waits = [log.host_synchronizations() for log in module.logs]
    held_back = sum(counter.pop(each) for counter in waits for each in list(counter) if _holds_back(each))
    return Cost(
        sum(sum(log.kernels().values()) for log in module.logs),
        sum(sum(log.collectives().values()) for log in module.logs),
        *(sum(each.values()) for each in waits),
        backwards.events() + step.events(),
        module.peak,
        module.before,
        tuple(f"{each.operation} at {each.location}" for counter in waits for each in counter.elements()),
        held_back,
    )


def _holds_back(wait: Any) -> bool:
    # Torch does not tell where a real GPU's events are waited for; nobody else does.
    return wait.operation.startswith("cudaEventSynchronize") and (not wait.location or "zero/" in wait.location)


def _strategy(case: Case) -> Any:
    if case.strategy == "fsdp":
        return zp.ZeroPlusFSDPStrategy()
    return case.strategy if isinstance(case.strategy, str) else zero_plus(case.strategy, case.config or {})


def _train_without_strategy(module: _Module) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    net = module.net.to(device)
    optimizer = module.configure_optimizers()
    for index, (x,) in zip(range(3), module.train_dataloader(), strict=False):
        x = x.to(device)
        with module.measured(index):
            for part in x.chunk(module.case.backwards):
                net(part).backward()
        with module.measured(index):
            optimizer.step()
            optimizer.zero_grad()
        module.peak = torch.cuda.max_memory_allocated()
