"""A training step, measured on the simulated device: bytes that are allocated, and collectives."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zeroplus as zp
from lightning_zeroplus.callbacks.traffic import ReductionTraffic
from lightning_zeroplus.testing.simulated_cuda import record
from tests.support.training import trainer

_SIMULATED = torch.version.cuda is None
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-3),
}


class Case(NamedTuple):
    """A training step.

    Attributes:
        strategy: A stage of ZeRO, ``"fsdp"`` or ``"ddp"``.
        backwards: Of a step.
        window: They share one reduction.
        precision: The Trainer's.
        optimizer: A key of ``OPTIMIZERS``.
        layers: Linear layers.
        width: Their features.
        offload: Of the strategy.
        config: Of DeepSpeed, or arguments of DDP.
        wrap: Of FSDP2: every linear layer.
        accumulate: ``accumulate_dtype="float32"``.
        groups: Parameter groups: one for the weights, one for the biases.
        reshard: ``reshard_after_forward`` of FSDP2.
    """

    strategy: int | str
    backwards: int = 2
    window: bool = False
    precision: Any = "32-true"
    optimizer: str = "adamw"
    layers: int = 12
    width: int = 128
    offload: bool = False
    config: dict[str, Any] | None = None
    wrap: bool = False
    accumulate: bool = False
    groups: bool = False
    reshard: bool | None = None

    def grouped(self, params: list[nn.Parameter]) -> Any:
        """What an optimizer is given."""
        return [{"params": params[::2]}, {"params": params[1::2]}] if self.groups else params


class Measured(NamedTuple):
    """What the third step of a rank took.

    Attributes:
        between: Bytes on the device when it began.
        peak: The most bytes.
        reduced: Count and payload of the gradient reductions, as ``ReductionTraffic`` counts them; None: not ZeRO.
        payloads: Bytes of the collectives, by kind; small ones are left out. Empty on a real GPU, which has no log.
        host: Bytes of tensors in host memory since the strategy was set up.
    """

    between: int
    peak: int
    reduced: tuple[int, int] | None
    payloads: dict[str, int]
    host: int


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(case.width, case.width) for _ in range(case.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Module(pl.LightningModule):
    def __init__(self, case: Case, before: tuple[int, int] = (0, 0)) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.case, self.net = case, Net(case)
        self.between = self.peak = self.host = 0
        self.before, self.log = before, ExitStack()
        self.traffic: ReductionTraffic | None = None
        self.payloads: dict[str, int] = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.case.optimizer](self.case.grouped(list(self.parameters())))

    def on_train_start(self) -> None:
        if self.case.strategy == "ddp" and _SIMULATED:
            # Times forwards with a timer for CUDA, which a CPU build of torch does not have.
            self.trainer.strategy.model.logger = SimpleNamespace(
                set_runtime_stats_and_log=lambda: None,
                _get_ddp_logging_data=lambda: SimpleNamespace(strs_map={}, ints_map={}),
            )
        if isinstance(self.case.strategy, int):
            self.traffic = ReductionTraffic(self.trainer.strategy.model, lambda: self.trainer.global_step)
            self.traffic.install()

    def on_train_end(self) -> None:
        if self.traffic is not None:
            self.traffic.uninstall()
            self.traffic.observe()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 2:
            gc.collect()
            self.host = _on_host() - self.before[1]
            self.between = _allocated() - self.before[0]
            torch.cuda.reset_peak_memory_stats()
            self.recorded = self.log.enter_context(record()) if _SIMULATED else None

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index == 2:
            self.log.close()
            self.peak = _allocated("peak") - self.before[0]
            self.payloads = _payloads(self.recorded) if _SIMULATED else {}

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        with self.trainer.strategy.coalesce() if self.case.window else nullcontext():
            for part in batch[0].chunk(self.case.backwards):
                self.manual_backward(self.net(part))
        optimizer.step()
        optimizer.zero_grad()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(6 * self.case.backwards, self.case.width)), self.case.backwards)


def _allocated(when: str = "current") -> int:
    """Bytes that were asked for, ``"current"`` or ``"peak"``; a GPU's allocator hands out a little more."""
    if _SIMULATED:
        return torch.cuda.memory_allocated() if when == "current" else torch.cuda.max_memory_allocated()
    return int(torch.cuda.memory_stats().get(f"requested_bytes.all.{when}", 0))


def _on_host() -> int:
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor) and each.device.type == "cpu"]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


#: Smaller collectives are messages: whether the ranks agree, norms.
_MESSAGE = 256


def _payloads(log: Any) -> dict[str, int]:
    """Bytes of the whole tensors of all collectives that are no messages, by kind."""
    payloads: Counter[str] = Counter()
    for entry in log.entries:
        if entry.kind == "collective":
            payload = max(sum(end - start for start, end in each) for each in (entry.reads, entry.writes))
            if payload > _MESSAGE:
                payloads[_KINDS[entry.name]] += payload
    return dict(payloads)


_KINDS = {
    "nccl::all_reduce": "all_reduce",
    "nccl::reduce_scatter_tensor": "reduce_scatter",
    "nccl::all_gather_into_tensor": "all_gather",
}


def measure(case: Case) -> Measured:
    """Train three steps on this rank; what the third takes."""
    gc.collect()
    module = Module(case, (_allocated(), _on_host()))
    trainer(_strategy(case), max_steps=3, accelerator="cuda", precision=case.precision).fit(module)
    reduced = None
    if module.traffic is not None:
        (step,) = [each for each in module.traffic.drain_finished_steps(wait=True) if each.step == 2]
        reduced = step.collectives, step.bytes
    return Measured(module.between, module.peak, reduced, module.payloads, module.host)


def _strategy(case: Case) -> Any:
    if case.strategy == "fsdp":
        return zp.ZeroPlusFSDPStrategy(wrap=nn.Linear if case.wrap else None, reshard_after_forward=case.reshard)
    if case.strategy == "ddp":
        return DDPStrategy(**(case.config or {}))
    assert isinstance(case.strategy, int)
    return zp.ZeroPlusStrategy(
        case.strategy,
        offload="cpu" if case.offload else None,
        accumulate_dtype="float32" if case.accumulate else None,
        config=case.config,
    )
