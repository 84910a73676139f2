"""LightningModules, plain and sharded by hand, and what to measure on them; for functions that run on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_zeroplus.strategy.fsdp2.trainer import ZeroPlusFSDPStrategy

DIM = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Four units when blocks are units: two blocks, and the net with what is left."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class CountedReduceScatter:
    """FSDP2's public means to see its reduce-scatters."""

    setter = "set_custom_reduce_scatter"

    def __init__(self) -> None:
        self.calls = 0
        self.dtypes: set[torch.dtype] = set()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls += 1
        self.dtypes.add(input_tensor.dtype)
        return torch.distributed.reduce_scatter_tensor(
            output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op
        )

    def watch(self, module: nn.Module) -> int:
        units = [each for each in module.modules() if isinstance(each, FSDPModule)]
        for unit in units:
            getattr(unit, self.setter)(self)
        return len(units)


class CountedGather(CountedReduceScatter):
    """The same for its all-gathers."""

    setter = "set_custom_all_gather"

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:  # type: ignore[override]
        self.calls += 1
        return torch.distributed.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Task(pl.LightningModule):
    """Automatic optimization."""

    def __init__(self, optimizer: str = "sgd", make_net: Callable[[], nn.Module] = Net) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = make_net()
        self.optimizer = optimizer
        self.counted = CountedReduceScatter()
        self.units = 0
        self.losses: list[float] = []

    def on_fit_start(self) -> None:
        self.units = self.counted.watch(self)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).float(), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), 1e-2)
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class ManualTask(Task):
    """Four backwards per step; subclasses say how."""

    backwards = 4

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def chunks(self, batch: Any) -> list[Any]:
        return list(zip(batch[0].chunk(self.backwards), batch[1].chunk(self.backwards), strict=True))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for chunk in self.chunks(batch):
            self.manual_backward(self.loss(chunk) / self.backwards)
        self.optimizers().step()
        self.optimizers().zero_grad()


class ShardsItself:
    """Mixin: FSDP2 as its users write it, for ``ModelParallelStrategy``."""

    policy = MixedPrecisionPolicy()

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh, mp_policy=self.policy)
        fully_shard(self.net, mesh=mesh, mp_policy=self.policy)


class PlainManualTask(ShardsItself, ManualTask):
    """FSDP2's own accumulation: the last of the backwards reduces."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for index, chunk in enumerate(self.chunks(batch)):
            self.net.set_requires_gradient_sync(index == self.backwards - 1)
            self.manual_backward(self.loss(chunk) / self.backwards)
        self.optimizers().step()
        self.optimizers().zero_grad()


class WindowTask(ManualTask):
    window: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with self.trainer.strategy.coalesce(**self.window):
            for chunk in self.chunks(batch):
                self.manual_backward(self.loss(chunk) / self.backwards)
        self.optimizers().step()
        self.optimizers().zero_grad()


class AnnouncedWindowTask(WindowTask):
    window = {"backwards": 4}


def loader(samples: int = 320, batch_size: int = 16) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, DIM, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=batch_size)


def ours(**kwargs: Any) -> ZeroPlusFSDPStrategy:
    return ZeroPlusFSDPStrategy(**({"wrap": Block} | kwargs))


def plain(**kwargs: Any) -> ModelParallelStrategy:
    world_size = torch.distributed.get_world_size()
    return ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1, **kwargs)


def trainer(strategy: Any, **kwargs: Any) -> pl.Trainer:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    defaults = {"accelerator": "cpu", "devices": torch.distributed.get_world_size(), "max_steps": 10, "max_epochs": 9}
    return pl.Trainer(strategy=strategy, **(defaults | quiet | kwargs))


def fit(strategy: Any, task: Any, **kwargs: Any) -> Any:
    trainer(strategy, **kwargs).fit(task, loader())
    return task


def weights(module: nn.Module) -> Tensor:
    """All parameters, gathered, as one vector of their dtype."""
    return torch.cat([full(param).flatten() for param in module.parameters()])


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())
