"""Random turns of three optimizers over three networks, and the same turns by plain torch in one process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zeroplus as zp
from tests.support.training import trainer

#: Two or three ranks do not divide it into equal partitions.
WIDTH = 7
STEPS = 20
#: L2 norm of the difference over that of the way from the start.
BOUNDS = {"sgd": 2e-6, "adam": 1e-5, "shared": 1e-5}
SETUPS: dict[str, dict[str, Any]] = {
    **{f"stage{stage}": {"stage": stage} for stage in range(4)},
    **{f"stage{stage}_offload": {"stage": stage, "offload": "cpu"} for stage in (2, 3)},
    **{f"stage{stage}_step": {"stage": stage, "reduction": "step"} for stage in (2, 3)},
    "stage1_backward": {"stage": 1, "reduction": "backward"},
}


class Turn(NamedTuple):
    """What is done: ``backward`` of a loss; ``step``, ``zero`` or ``clip`` of an optimizer; ``open``/``close``."""

    what: str
    number: int = 0
    clip: tuple[float, str] = (0.0, "")


def turns(seed: int) -> list[list[Turn]]:
    """The turns of each batch: each optimizer is zeroed between two steps of its own, if late."""
    chance = random.Random(seed)
    batches, steps, stale = [], 0, set[int]()
    while steps < STEPS:
        batch: list[Turn] = []
        for _ in range(chance.randint(1, 2)):
            backwards = [Turn("backward", chance.randrange(len(LOSSES))) for _ in range(chance.randint(1, 2))]
            window = chance.random() < 0.3
            batch += [Turn("open"), *backwards, Turn("close")] if window else backwards
            ready = chance.sample(range(3), chance.randint(1, 3))
            batch += [Turn("zero", number) for number in ready if number in stale]
            if stale & set(ready):
                batch.append(Turn("backward", chance.randrange(len(LOSSES))))
            stale -= set(ready)
            clips = [number for number in ready if chance.random() < 0.3]
            limits = (0.05, "norm"), (0.01, "value")
            batch += [Turn("clip", number, chance.choice(limits)) for number in clips]
            for number in ready:
                batch.append(Turn("step", number))
                if chance.random() < 0.6:
                    batch.append(Turn("zero", number))
                else:
                    stale.add(number)
            steps += len(ready)
        batches.append(batch)
    return batches


def networks() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for name in "abc"})


#: Some reach one network, some two or three; one of them stops at a detached output.
LOSSES: Sequence[Callable[[Any, Tensor], Tensor]] = (
    lambda net, x: net["a"](x).square().mean(),
    lambda net, x: net["b"](net["a"](x)).mean(),
    lambda net, x: net["c"](net["b"](net["a"](x).detach())).mean(),
    lambda net, x: (net["a"](x) * net["c"](x)).mean(),
    lambda net, x: net["c"](net["b"](net["a"](x))).square().sum(),
)


def optimizers(net: Any, kind: str) -> list[torch.optim.Optimizer]:
    """One per network, of different kinds and with different settings."""
    a, b, c = (list(net[name].parameters()) for name in "abc")
    if kind == "sgd":
        rates = (0.1, 0.0), (0.05, 0.9), (0.02, 0.5)
        return [torch.optim.SGD(each, lr, momentum) for each, (lr, momentum) in zip((a, b, c), rates, strict=True)]
    if kind == "shared":  # each parameter is in two or three of them
        cut: list[Any] = [{"params": [b[0], *c], "weight_decay": 0.1}, {"params": a[1:], "lr": 0.02}]
        return [
            torch.optim.SGD([*a, *b], 0.05, 0.9),
            torch.optim.AdamW(cut, 0.01, eps=1e-3),
            torch.optim.SGD([*c, *b, *a], 0.02, 0.5),
        ]
    groups: list[Any] = [{"params": c[:1], "weight_decay": 0.1}, {"params": c[1:], "lr": 0.02}]
    # A large eps: where a gradient is zero but for rounding, Adam would make an update of full size of it.
    return [
        torch.optim.Adam(a, 0.01, eps=1e-3),
        torch.optim.SGD(b, 0.05, 0.9),
        torch.optim.AdamW(groups, 0.01, eps=1e-3),
    ]


def inputs(batches: int, ranks: int) -> list[list[Tensor]]:
    """``(5, WIDTH)`` for each batch and rank."""
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(5, WIDTH, generator=generator) for _ in range(ranks)] for _ in range(batches)]


def reference(seed: int, kind: str, ranks: int) -> list[Tensor]:
    """The weights in the end."""
    net = networks()
    mine = optimizers(net, kind)
    plan = turns(seed)
    for batch, data in zip(plan, inputs(len(plan), ranks), strict=True):
        for turn in batch:
            match turn.what:
                case "backward":
                    for x in data:
                        (LOSSES[turn.number](net, x) / ranks).backward()
                case "clip":
                    everything = (param for group in mine[turn.number].param_groups for param in group["params"])
                    params = [param for param in everything if param.grad is not None]
                    limit, algorithm = turn.clip
                    if not params:
                        continue
                    if algorithm == "norm":
                        torch.nn.utils.clip_grad_norm_(params, limit)
                    else:
                        torch.nn.utils.clip_grad_value_(params, limit)
                case "step":
                    mine[turn.number].step()
                case "zero":
                    mine[turn.number].zero_grad()
    return [param.detach() for param in net.parameters()]


class Turns(pl.LightningModule):
    """The turns as a user writes them."""

    def __init__(self, seed: int, kind: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.kind, self.plan = networks(), kind, turns(seed)

    def training_step(self, batch: Tensor, index: int) -> None:
        mine: Any = self.optimizers()
        with contextlib.ExitStack() as window:
            for turn in self.plan[index]:
                match turn.what:
                    case "open":
                        window.enter_context(self.trainer.strategy.coalesce())  # type: ignore[attr-defined]
                    case "close":
                        window.close()
                    case "backward":
                        self.manual_backward(LOSSES[turn.number](self.net, batch))
                    case "clip":
                        self.clip_gradients(mine[turn.number], *turn.clip)
                    case "step":
                        mine[turn.number].step()
                    case "zero":
                        mine[turn.number].zero_grad()

    def configure_optimizers(self) -> Any:
        return optimizers(self.net, self.kind)


def errors(setups: list[str], kinds: list[str], seeds: list[int]) -> dict[Any, float]:
    """How far the weights are from the reference's in the end, by setup, kind of optimizers and seed; on each rank."""
    ranks, found = dist.get_world_size(), {}
    for kind in kinds:
        for seed in seeds:
            want = torch.cat([param.flatten() for param in reference(seed, kind, ranks)])
            start = torch.cat([param.detach().flatten() for param in networks().parameters()])
            for setup in setups:
                module = Turns(seed, kind)
                data = [batch[dist.get_rank()] for batch in inputs(len(module.plan), ranks)]
                zero = {"reduce_bucket_size": 60, "stage3_param_persistence_threshold": 0}
                strategy = zp.ZeroPlusStrategy(**SETUPS[setup], config={"zero_optimization": zero})
                trainer(strategy, max_epochs=1, devices=ranks, use_distributed_sampler=False).fit(
                    module,
                    DataLoader(data, batch_size=None),  # type: ignore[arg-type]
                )
                got = torch.cat([param.detach().flatten() for param in module.parameters()])
                found[setup, kind, seed] = float((got - want).norm() / (want - start).norm())
    return found
