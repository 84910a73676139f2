"""CachedLoss gives the gradients of the plain loss: to the bit in fp32, with dropout, ragged chunks, and all ranks."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zeroplus as zp
from lightning_zeroplus.callbacks.traffic import ReductionTraffic
from lightning_zeroplus.testing import train_reference
from tests.matrix.cells import BOUNDS, DTYPES, pretend_fp16_kernels, trained_weights
from tests.support.training import trainer

ROWS = 8


class Towers(nn.Module):
    """Two towers on one trunk, and a frozen one. Small integers keep fp32 sums exact."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.trunk, self.query, self.document = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.frozen = nn.Linear(8, 4).requires_grad_(False)
        self.temperature = nn.Linear(1, 1, bias=False)
        self.dropout = nn.Dropout(dropout)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-1, 2, param.shape, generator=generator))

    def left(self, x: Tensor) -> Tensor:
        return self.query(self.dropout(torch.relu(self.trunk(x))))

    def right(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.document(self.dropout(torch.relu(self.trunk(inputs["x"] + inputs["y"]))))

    def guide(self, x: Tensor) -> Tensor:
        return self.frozen(x)


def similarity(*embeddings: Tensor, net: Towers | None = None) -> Tensor:
    """A polynomial of all pairs, in-batch negatives without rounding, with or without a temperature that is learned."""
    left, right, guide = (embedding.float() for embedding in embeddings)
    scores = (left @ right.T) * (guide @ guide.T)
    if net is not None:
        scores = net.temperature(scores[..., None].to(net.temperature.weight.dtype)).float()
    return scores.mean() / 1024 + left.square().mean() / 64


@dataclass(frozen=True)
class Case:
    stage: int
    precision: str = "32-true"
    dropout: float = 0.0
    cross_rank: bool = False
    uneven: bool = False
    chunk_size: Any = 3
    strategy: str = "zeroplus"
    #: The loss has a parameter.
    learned: bool = True

    @property
    def kind(self) -> str:
        return self.precision.split("-")[0]


def _batch(case: Case, rank: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    rows = ROWS + 2 - 4 * rank if case.uneven else ROWS
    generator = torch.Generator().manual_seed(10 + rank)
    draw = [torch.randint(-2, 3, (rows, 8), generator=generator).float() for _ in range(4)]
    return draw[0], {"x": draw[1], "y": draw[2]}, draw[3]


class Loop(pl.LightningModule):
    def __init__(self, case: Case, cached: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.case, self.cached = case, cached
        self.net = Towers(case.dropout)
        self.loss = zp.CachedLoss(self.similarity, case.chunk_size, case.cross_rank)
        self.losses: list[float] = []

    def similarity(self, *embeddings: Tensor) -> Tensor:
        return similarity(*embeddings, net=self.net if self.case.learned else None)

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        torch.manual_seed(index)
        encoders = (self.net.left, self.net.right, self.net.guide)
        if self.cached:
            with (
                ReductionTraffic(self.trainer.strategy.model, int)
                if self.counts
                else contextlib.nullcontext() as traffic
            ):
                loss = self.loss(self, encoders, *batch)
                assert not loss.requires_grad
                self.collectives = traffic._collectives if self.counts else 0
        else:
            loss = self.similarity(*_encode_in_chunks(encoders, batch, self.case.chunk_size))
            self.manual_backward(loss)
        self.losses.append(float(loss))
        self.next_number = float(torch.rand(()))
        optimizer.step()
        optimizer.zero_grad()
        self.after = trained_weights(self.net, self.trainer.strategy.model)

    @property
    def counts(self) -> bool:
        return isinstance(self.trainer.strategy, zp.ZeroPlusStrategy) and self.case.stage > 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.125)


def _rows(inputs: Any, start: int, end: int) -> Any:
    if isinstance(inputs, dict):
        return {key: value[start:end] for key, value in inputs.items()}
    return inputs[start:end]


def _encode_in_chunks(encoders: Any, columns: Any, size: int) -> list[Tensor]:
    """With a graph, in the order in which CachedLoss draws its random numbers."""
    return [
        torch.cat([encoder(_rows(column, at, at + size)) for at in range(0, ROWS, size)])
        for encoder, column in zip(encoders, columns, strict=True)
    ]


def _fit(case: Case, cached: bool = True, **ddp: Any) -> Loop:
    if case.kind == "16":
        pretend_fp16_kernels()
    config: dict[str, Any] = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    if case.kind == "16":
        config["fp16"] = {"loss_scale": 1024}
    strategy: Any = case.strategy
    if ddp:
        strategy = DDPStrategy(**ddp)
    elif strategy == "zeroplus":
        strategy = zp.ZeroPlusStrategy(stage=case.stage, reduction="backward", config=config)
    module = Loop(case, cached)
    run = trainer(strategy, precision=case.precision, max_epochs=1, use_distributed_sampler=False)
    run.fit(module, DataLoader(_Data(case), batch_size=None))
    return module


class _Data(torch.utils.data.IterableDataset[Any]):
    def __init__(self, case: Case) -> None:
        self.case = case

    def __iter__(self) -> Any:
        yield _batch(self.case, dist.get_rank())


def _against_reference(case: Case, **ddp: Any) -> tuple[float, bool, int]:
    module = _fit(case, **ddp)
    dtype = DTYPES[case.kind]

    def plain(net: Any, batch: Any, backward: Any, index: int) -> None:
        left, right, guide = torch.utils._pytree.tree_map(lambda leaf: leaf.to(dtype), batch)
        embeddings = net.left(left), net.right(right), net.guide(guide)
        backward(similarity(*embeddings, net=net if case.learned else None))

    ranks = [_batch(case, rank) for rank in range(2)]
    if case.cross_rank:
        ranks = [torch.utils._pytree.tree_map(lambda *leaves: torch.cat(leaves), *ranks)]
    net = Towers().to(dtype)
    want = train_reference(net, lambda params: torch.optim.SGD(params, 0.125), plain, [ranks]).params[0]
    start = [param.detach() for param in Towers().parameters()]
    moved = sum((w - s).square().sum() for w, s in zip(want, start, strict=True)) ** 0.5
    error = sum((g - w).square().sum() for g, w in zip(module.after, want, strict=True)) ** 0.5
    exact = all(torch.equal(g, w) for g, w in zip(module.after, want, strict=True))
    return float(error / moved), exact, module.collectives


CASES = [
    *(Case(stage) for stage in range(4)),
    *(Case(stage, chunk_size=size) for stage in (2, 3) for size in (1, 100, (2, 5, 8))),
    *(Case(stage, cross_rank=True) for stage in range(4)),
    *(Case(stage, cross_rank=True, uneven=True) for stage in (0, 2)),
    *(Case(stage, precision=precision) for stage in range(4) for precision in ("bf16-true", "bf16-mixed", "16-true")),
    *(Case(stage, cross_rank=True, learned=False) for stage in (0, 3)),
    # Each backward reaches one column.
    Case(0, strategy="ddp_find_unused_parameters_true"),
    Case(0, strategy="ddp_find_unused_parameters_true", cross_rank=True),
]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_the_plain_loss(ranks2: Any, case: Case) -> None:
    for error, exact, collectives in ranks2.run(_against_reference, case):
        assert error <= BOUNDS[case.kind]
        assert exact or case.kind != "32"
        assert collectives <= 1


def _under_ddp() -> tuple[list[float], str]:
    """The errors with each of DDP's arguments that changes how it reduces, and what the last one raises."""
    views = [{"gradient_as_bucket_view": True}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}]
    errors = [_against_reference(Case(0), **each)[0] for each in views]
    try:
        _fit(Case(0), static_graph=True)
    except MisconfigurationException as error:
        return errors, str(error)
    return errors, ""


def test_arguments_of_ddp(ranks2: Any) -> None:
    for errors, refused in ranks2.run(_under_ddp):
        assert errors == [0, 0]
        assert "use `DDPStrategy(static_graph=False)`" in refused, "torch says: INTERNAL ASSERT FAILED, report a bug"


def _dropout(stage: int) -> tuple[bool, bool, bool, bool]:
    cached, plain = _fit(Case(stage, dropout=0.5)), _fit(Case(stage, dropout=0.5), cached=False)
    other = _fit(Case(stage, dropout=0.0))

    def same(left: Loop, right: Loop) -> bool:
        return all(torch.equal(a, b) for a, b in zip(left.after, right.after, strict=True))

    same_stream = cached.next_number == plain.next_number
    return same(cached, plain), cached.losses == plain.losses, same_stream, same(cached, other)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_dropout_is_replayed_to_the_bit(ranks2: Any, stage: int) -> None:
    for weights, losses, next_number, without_dropout in ranks2.run(_dropout, stage):
        assert weights and losses
        assert next_number, "the second pass must draw nothing from the stream that the user sees"
        assert not without_dropout


def _without_replay(stage: int) -> bool:
    from unittest.mock import patch

    from lightning_zeroplus.losses.replay import RandomState

    with patch.object(RandomState, "again", lambda self: contextlib.nullcontext()):
        return _dropout(stage)[0]


def test_dropout_that_is_not_replayed_would_be_seen(ranks2: Any) -> None:
    assert ranks2.run(_without_replay, 2) == [False, False]


class _Alone(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Towers()


def test_no_gradient_where_none_is_wanted() -> None:
    module = _Alone()
    batch = _batch(Case(0), 0)
    encoders = (module.net.left, module.net.right, module.net.guide)
    with torch.no_grad():
        loss = zp.CachedLoss(similarity, 3)(module, encoders, *batch)
        assert loss == similarity(*(encoder(column) for encoder, column in zip(encoders, batch, strict=True)))
    assert all(param.grad is None for param in module.parameters())


@pytest.mark.parametrize("size", [0, -1, 2.5, True, [], [4, 0]])
def test_bad_chunk_sizes_are_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="`chunk_size` must be a positive integer"):
        zp.CachedLoss(similarity, size)


def test_bad_columns_are_refused() -> None:
    module = _Alone()
    module.automatic_optimization = False
    x = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="at least one column"):
        zp.CachedLoss(similarity)(module, module.net.left)
    with pytest.raises(ValueError, match="`chunk_size` has 2 entries for 1 columns"):
        zp.CachedLoss(similarity, [1, 2])(module, module.net.left, x)
    with pytest.raises(ValueError, match="`encoder` has 1 entries for 2 columns"):
        zp.CachedLoss(similarity)(module, [module.net.left], x, x)
    with pytest.raises(ValueError, match="Column 1 of `CachedLoss`"):
        zp.CachedLoss(similarity)(module, module.net.left, x, {"x": x, "y": x[:2]})
    with pytest.raises(ValueError, match=r"shape \(8,\) for 4 rows"):
        zp.CachedLoss(similarity)(module, lambda chunk: chunk.sum(0), x)
    with pytest.raises(ValueError, match="must return a scalar"):
        zp.CachedLoss(lambda embedding: embedding)(module, module.net.left, x)


def test_automatic_optimization_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="automatic_optimization = False"):
        zp.CachedLoss(similarity)(_Alone(), lambda chunk: chunk, torch.zeros(2, 8))
