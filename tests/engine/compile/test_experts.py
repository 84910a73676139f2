"""A mixture of experts with a Python loop over those that were hit: Qwen2-MoE's block, small, with random weights."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.training import relative_error, trainer, weights, zero_plus

transformers = pytest.importorskip("transformers")

WIDTH, TOKENS, STEPS = 16, 24, 20


def build_block() -> nn.Module:
    from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    config = Qwen2MoeConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=WIDTH,
        num_experts=4,
        num_experts_per_tok=2,
    )
    config._experts_implementation = "eager"
    return Qwen2MoeSparseMoeBlock(config)


class Experts(nn.Module):
    """``[batch, tokens, WIDTH] -> [batch, tokens, 4]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.block = build_block()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        out = self.block(x)
        return self.head(x + (out[0] if isinstance(out, tuple) else out))


class ListOfExperts(nn.Module):
    """Separate modules, of which a rank runs those that its tokens were sent to: not the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.hit: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        self.hit.append(chosen.unique().tolist())
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            hit = chosen == index
            out[hit] = self.experts[index](x[hit]) * weights[hit, None]
        return out


class Module(pl.LightningModule):
    """Records its losses."""

    def __init__(self, leaf: bool) -> None:
        super().__init__()
        self.leaf = leaf
        torch.manual_seed(0)
        self.net = Experts()
        if leaf:
            self.net.block = ListOfExperts()
        for param in self.net.parameters():
            nn.init.normal_(param, std=0.2)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.leaf:
            from deepspeed.utils import set_z3_leaf_modules

            set_z3_leaf_modules(self.net, [ListOfExperts])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _batches(tokens: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    x = torch.randn(STEPS, 2, tokens, 8, generator=generator)
    y = torch.randint(0, 4, (STEPS, 2, tokens), generator=generator)
    return DataLoader(list(zip(x, y, strict=True)), batch_size=None)  # type: ignore[arg-type]


def _train(strategy: Any, leaf: bool) -> tuple[list[float], Tensor]:
    module = Module(leaf)
    trainer(strategy, max_epochs=1, use_distributed_sampler=False).fit(module, _batches(1 if leaf else TOKENS))
    return module.losses, weights(module)  # type: ignore[arg-type]


def _compare(stage: int, leaf: bool, compile: bool = True) -> tuple[float, float, int]:
    losses, found = _train(zero_plus(stage, compile={"backend": "eager"} if compile else False), leaf)
    expected, wanted = _train("ddp_find_unused_parameters_true", leaf)
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return difference, relative_error(found, wanted), len(losses)


def _experts_per_rank() -> list[list[int]]:
    module = Module(leaf=True)
    for x, _ in _batches(1):
        module.net(x)
    return module.net.block.hit


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.thorough), 2, 3])
def test_losses_are_those_of_ddp(ranks2: Any, stage: int) -> None:
    for difference, error, steps in ranks2.run(_compare, stage, False):
        assert steps == STEPS
        assert difference <= 1e-5 and error <= 1e-5


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("stage", "compile"), [(1, True), (3, True), (3, False)])
def test_ranks_with_different_experts(ranks2: Any, stage: int, compile: bool) -> None:
    """At stage 3 as a leaf module, all of which is gathered."""
    first, second = ranks2.run(_experts_per_rank)
    assert sum(a != b for a, b in zip(first, second, strict=True)) >= STEPS // 2
    for difference, error, _ in ranks2.run(_compare, stage, True, compile):
        assert difference <= 1e-5 and error <= 1e-5
