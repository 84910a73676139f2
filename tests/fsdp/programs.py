"""Runs programs under DDP and under ``zeroplus_fsdp``; for functions that run on ranks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from tests.fsdp.training import Block, ManualTask, Task, full, loader, ours, trainer

#: Ways to shard and to reduce; with ``wrap`` there are units that are sharded between a forward and its backward.
WAYS: dict[str, dict[str, Any]] = {"roots": {"wrap": None}, "blocks": {"wrap": Block}, "step": {"reduction": "step"}}


class Automatic(Task):
    """A task that notes numbers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.noted: list[float] = []


class Manual(ManualTask):
    """Two backwards per step; programs say what happens around them."""

    backwards = 2

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.noted: list[float] = []

    def differentiate(self, batch: Any) -> None:
        for chunk in self.chunks(batch):
            self.manual_backward(self.loss(chunk) / self.backwards)

    def step(self) -> None:
        self.optimizers().step()
        self.optimizers().zero_grad()


def noise(like: Tensor) -> Tensor:
    """A whole tensor, the same on all ranks."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(like.numel()))


def run(program: type, strategy: Any, **kwargs: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Fit a program; its weights, whole, and what it has noted."""
    torch.manual_seed(1)
    task = program()
    before = {name: value.detach().clone() for name, value in task.named_parameters()}
    settings = {"max_steps": 6, **getattr(program, "trainer_kwargs", {}), **kwargs}
    batches = _all_batches() if isinstance(strategy, SingleDeviceStrategy) else loader()
    trainer(strategy, **settings).fit(task, batches, loader(64) if hasattr(program, "validates") else None)
    after = {name: full(value) for name, value in (*task.named_parameters(), *task.named_buffers())}
    moved = [not torch.equal(value, before[name]) for name, value in after.items() if name in before]
    assert any(moved), "no parameter has moved"
    return after, task.noted


def _all_batches() -> DataLoader[Any]:
    """What two ranks get together, for one process."""
    data = loader().dataset
    return DataLoader(data, batch_size=32, sampler=DistributedSampler(data, num_replicas=1, rank=0, seed=0))


def difference(program: type, way: str) -> tuple[float, float]:
    """Largest difference of a weight or buffer from the reference, over its largest element; and of what was noted."""
    if getattr(program, "reference", "ddp") == "single":
        want = run(program, SingleDeviceStrategy("cpu"), devices=1)
    else:
        want = run(program, "ddp_find_unused_parameters_true")
    got = run(program, ours(**{**WAYS[way], **getattr(program, "strategy_kwargs", {})}))
    assert got[0].keys() == want[0].keys() and len(got[1]) == len(want[1])
    for name, value in want[0].items():
        assert got[0][name].dtype == value.dtype and got[0][name].shape == value.shape, name
    scale = max(float(value.abs().max()) for value in want[0].values() if value.numel())
    error = max(float((got[0][name] - value).abs().max()) for name, value in want[0].items() if value.numel())
    noted = max((abs(a - b) / max(abs(b), 1.0) for a, b in zip(got[1], want[1], strict=True)), default=0.0)
    return error / scale, noted


def message(program: type, way: str = "roots") -> str:
    """The exception with which a program is refused."""
    try:
        run(program, ours(**WAYS[way]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"
