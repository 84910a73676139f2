"""Cells of the README's table of features that no other test shows: DDP and FSDP2 as Lightning drives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from tests.docs.small import Small, check_trained, error_of, fit


class Sharded(Small):
    """FSDP2, by the module itself."""

    def configure_model(self) -> None:
        assert self.net is not None
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Clipping(Sharded):
    def __init__(self, limit: float, algorithm: str) -> None:
        super().__init__()
        self.limit, self.algorithm = limit, algorithm
        self.largest = 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: self.look())
        return optimizer

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(10 * self.loss(batch))
        self.clip_gradients(optimizer, self.limit, self.algorithm)
        optimizer.step()
        optimizer.zero_grad()

    def look(self) -> None:
        grads = [param.grad.full_tensor() for param in self.parameters()]  # type: ignore[union-attr]
        largest = (
            torch.nn.utils.get_total_norm(grads) if self.algorithm == "norm" else max(g.abs().max() for g in grads)
        )
        self.largest = max(self.largest, float(largest))


def _strategy() -> Any:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")


def _several_backwards() -> None:
    module = Sharded()
    fit(module, _strategy())
    check_trained(module)


def test_fsdp2_counts_several_backwards(ranks2: Any) -> None:
    ranks2.run(_several_backwards)


def _clipped(limit: float, algorithm: str) -> float:
    module = Clipping(limit, algorithm)
    fit(module, _strategy())
    return module.largest


@pytest.mark.parametrize(("limit", "algorithm"), [(0.125, "norm"), (0.0625, "value")])
def test_fsdp2_clips_in_manual_optimization(ranks2: Any, limit: float, algorithm: str) -> None:
    for largest in ranks2.run(_clipped, limit, algorithm):
        assert largest == pytest.approx(limit, rel=1e-4)


class Cached(Small):
    """The same gradient, by a leaf loss whose hook runs the backwards."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = torch.zeros((), requires_grad=True)

        @torch.enable_grad()
        def nested(grad: Tensor) -> None:
            for chunk in batch.chunk(8):
                (self.loss(chunk) * grad).backward()

        loss.register_hook(nested)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def _cached(strategy: str) -> float:
    module = Cached()
    fit(module, strategy)
    return error_of(module)


def test_ddp_is_silently_wrong_where_backwards_nest(ranks2: Any) -> None:
    """And raises where it looks for unused parameters."""
    for ours, theirs in zip(ranks2.run(_cached, "zeroplus_stage2"), ranks2.run(_cached, "ddp"), strict=True):
        assert ours < 1e-5 and theirs > 0.1, (ours, theirs)


def _refusals() -> list[str]:
    told = []
    for module in (Small(), torch.compile(Small())):
        try:
            fit(module, "deepspeed_stage_2")  # type: ignore[arg-type]
        except Exception as error:
            told.append(str(error))
    return told


def test_lightnings_strategy_refuses_the_cpu_and_compiled_modules(ranks2: Any) -> None:
    for on_cpu, compiled in ranks2.run(_refusals):
        assert "CUDA" in on_cpu, on_cpu
        assert "Using a compiled model is incompatible" in compiled, compiled
