"""Cached losses of texts on several ranks: chunks by tokens, unequal numbers of chunks, and one reduction under DDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import lightning_zeroplus as zp
from lightning_zeroplus.losses.columns import Column
from lightning_zeroplus.testing import train_reference
from tests.support.training import trainer, zero_plus

#: fp32; the cached loss adds in another order. Relative to the update.
BOUND = 1e-5
TOKENS, WORDS, WIDTH = 12, 16, 8
STEPS = 2


@dataclass(frozen=True)
class Case:
    strategy: int | str
    #: Of the two ranks.
    rows: tuple[int, int] = (10, 4)
    chunk_size: int | None = 3
    chunk_tokens: int | None = None
    #: How the embeddings of the ranks come together: in ``CachedLoss``, in ``info_nce``, or not at all.
    gathers: str = "info_nce"
    dropout: float = 0.0


class Texts(nn.Module):
    """Two layers over the mean of a text's words, and a temperature."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.seen: list[tuple[int, int]] = []

    def forward(self, text: dict[str, Any]) -> Tensor:
        ids, mask = text["input_ids"], text["attention_mask"]
        self.seen.append(tuple(ids.shape))
        assert ids.shape == mask.shape and text["prompt"] == "a string"
        tokens = self.net(self.words(ids) + self.positions(torch.arange(ids.shape[1])))
        return F.normalize((tokens * mask[..., None]).sum(1), dim=1)


def _text(rows: int, generator: torch.Generator) -> dict[str, Any]:
    lengths = torch.randint(1, TOKENS + 1, (rows,), generator=generator)
    mask = (torch.arange(TOKENS) < lengths[:, None]).long()
    return {"input_ids": torch.randint(WORDS, (rows, TOKENS), generator=generator) * mask, "attention_mask": mask}


def _batch(case: Case, step: int, rank: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [{**_text(case.rows[rank], generator), "prompt": "a string"} for _ in range(2)]


class Loop(pl.LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.case, self.net = case, Texts(case.dropout)
        sizes = {"chunk_size": case.chunk_size, "chunk_tokens": case.chunk_tokens}
        self.loss = zp.CachedLoss(self.contrast, cross_rank=case.gathers == "cached", **sizes)
        self.buckets: list[int] = []

    def contrast(self, queries: Tensor, documents: Tensor) -> Tensor:
        options: Any = {"symmetric": True, "cross_rank": self.case.gathers == "info_nce", "tile_rows": 4}
        return zp.losses.info_nce(queries, documents, self.net.temperature, **options)

    def on_fit_start(self) -> None:
        if isinstance(self.trainer.strategy.model, DistributedDataParallel):
            self.trainer.strategy.model.register_comm_hook(None, self._count)

    def _count(self, state, bucket):  # DDP checks annotations, which are strings here
        self.buckets[-1] += 1
        return allreduce_hook(None, bucket)

    def training_step(self, batch: list[dict[str, Any]], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.buckets.append(0)
        self.loss(self, self.net, *batch)
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _sgd(list(self.parameters()))


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2, momentum=0.5)


def _strategy(case: Case) -> Any:
    if case.strategy == "fsdp":
        return zp.ZeroPlusFSDPStrategy()
    return zero_plus(case.strategy) if isinstance(case.strategy, int) else case.strategy


def _fit(case: Case) -> Loop:
    module = Loop(case)
    run = trainer(_strategy(case), max_epochs=1, use_distributed_sampler=False)
    data: Any = [_batch(case, step, dist.get_rank()) for step in range(STEPS)]
    run.fit(module, DataLoader(data, batch_size=None))
    return module


def _flat(net: nn.Module) -> Tensor:
    with zp.gathered(net):
        return torch.cat([param.detach().flatten().clone() for param in net.parameters()])


def _wanted(case: Case) -> Tensor:
    """The weights that one process trains, with all rows in one batch and no chunks."""

    def plain(net: Any, batch: Any, backward: Any, index: int) -> None:
        queries, documents = (net(text) for text in batch)
        scores, labels = queries @ documents.T / net.temperature, torch.arange(len(queries))
        backward((F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2)

    data: Any = [[_batch(case, step, rank) for rank in range(2)] for step in range(STEPS)]
    if case.gathers != "none":
        data = [[[_join(sides) for sides in zip(*ranks, strict=True)]] for ranks in data]
    params = train_reference(Texts(), _sgd, plain, data).params[-1]
    return torch.cat([param.detach().flatten() for param in params])


def _join(texts: Any) -> dict[str, Any]:
    tensors = {key: torch.cat([text[key] for text in texts]) for key in ("input_ids", "attention_mask")}
    return {**tensors, "prompt": "a string"}


def _against_one_process(case: Case) -> tuple[float, list[tuple[int, int]], list[int]]:
    """The error, the shapes that the encoder has seen, and the buckets that DDP has reduced in each step."""
    module = _fit(case)
    start, want = _flat(Texts()), _wanted(case)
    error = (_flat(module.net) - want).norm() / (want - start).norm()
    return float(error), module.net.seen, module.buckets


_DDP = "ddp"
_UNUSED = "ddp_find_unused_parameters_true"
CASES = [
    Case(0),
    Case(3),
    Case("fsdp"),
    Case(3, gathers="cached"),
    Case("fsdp", gathers="cached"),
    Case(2, chunk_size=None, chunk_tokens=25),
    Case(3, chunk_size=None, chunk_tokens=25),
    Case("fsdp", chunk_size=2, chunk_tokens=25),
    Case(3, rows=(5, 5), chunk_size=None, chunk_tokens=25, gathers="none"),
    Case(_DDP),
    Case(_UNUSED, chunk_size=None, chunk_tokens=25),
]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_one_process_with_all_rows(ranks2: Any, case: Case) -> None:
    results = ranks2.run(_against_one_process, case)
    for error, seen, _ in results:
        assert error <= BOUND
        if case.chunk_tokens is not None:
            assert all(rows * tokens <= case.chunk_tokens for rows, tokens in seen)
            assert min(tokens for _, tokens in seen) < TOKENS, "padding must be cut"
    if case.strategy in (3, "fsdp"):
        counts = {len(seen) for _, seen, _ in results}
        assert len(counts) == 1, "each chunk gathers weights, on all ranks"
    for _, _, buckets in results:
        assert not isinstance(case.strategy, str) or case.strategy == "fsdp" or set(buckets) == {1}


# -- chunks ----------------------------------------------------------------------------------------------------------


def _column(lengths: list[int], chunk_tokens: int, chunk_size: int | None = None, left: bool = False) -> Column:
    positions = torch.arange(8)
    mask = torch.stack([(positions >= 8 - length) if left else (positions < length) for length in lengths]).float()
    ids = torch.arange(len(lengths))[:, None].expand(-1, 8)
    inputs = {"input_ids": ids, "attention_mask": mask, "features": mask.clone(), "labels": torch.arange(len(lengths))}
    return Column(0, lambda chunk: chunk["input_ids"][:, :1].float(), inputs, chunk_size, chunk_tokens)


def _shapes(column: Column) -> list[tuple[int, int]]:
    return [tuple(column.chunk(number)["input_ids"].shape) for number in range(column.count)]


def test_chunks_hold_as_many_tokens_as_they_may() -> None:
    column = _column([2, 8, 3, 1, 3, 0, 4], chunk_tokens=8)
    assert _shapes(column) == [(1, 8), (2, 4), (2, 3), (2, 1)]
    chunk = column.chunk(1)
    assert chunk["labels"].tolist() == [6, 2]
    assert chunk["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert chunk["features"].shape == (2, 8), "floats of this shape may be anything"
    embeddings = column.join([column.encode(number) for number in range(column.count)])
    assert embeddings.flatten().tolist() == list(range(7))
    grads = [column.part(embeddings, number).flatten().tolist() for number in range(column.count)]
    assert grads == [[1], [6, 2], [4, 0], [3, 5]]


def test_bounds_of_chunks() -> None:
    assert _shapes(_column([8, 2, 2, 2], chunk_tokens=4)) == [(1, 8), (2, 2), (1, 2)], "a longer row goes alone"
    assert _shapes(_column([2] * 5, chunk_tokens=80, chunk_size=2)) == [(2, 2), (2, 2), (1, 2)]
    assert _shapes(_column([1, 2, 3], chunk_tokens=16, left=True)) == [(2, 8), (1, 8)], "positions count from the left"


@pytest.mark.parametrize(
    "inputs", [torch.zeros(4, 8), {"attention_mask": torch.ones(4)}, {"input_ids": torch.ones(4, 2)}]
)
def test_chunks_of_tokens_need_a_mask(inputs: Any) -> None:
    with pytest.raises(ValueError, match="Column 0 of `CachedLoss` must be a dictionary with an `attention_mask`"):
        Column(0, lambda chunk: chunk, inputs, None, 8)


@pytest.mark.parametrize("tokens", [0, True, 1.5, [], [4, -1], "8"])
def test_bad_numbers_of_tokens_are_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match="`chunk_tokens` must be a positive integer"):
        zp.CachedLoss(lambda embedding: embedding.sum(), chunk_tokens=tokens)
    with pytest.raises(ValueError, match="`chunk_tokens` has 2 entries for 1 columns"):
        zp.CachedLoss(lambda embedding: embedding.sum(), chunk_tokens=[4, None])(
            pl.LightningModule(), lambda chunk: chunk, torch.zeros(4, 2)
        )


# -- replays ---------------------------------------------------------------------------------------------------------


def _next_number(case: Case) -> tuple[float, int]:
    """The number that the user draws after the fit, and how many chunks the encoder has seen."""
    torch.manual_seed(5)
    seen = len(_fit(case).net.seen)
    return float(torch.rand(())), seen


def test_chunks_of_other_ranks_draw_no_numbers(ranks2: Any) -> None:
    """A rank that encodes more often than it has chunks leaves the random numbers as they would be."""
    together, alone = Case(3, dropout=0.5, gathers="none"), Case(0, dropout=0.5, gathers="none")
    got, want = ranks2.run(_next_number, together), ranks2.run(_next_number, alone)
    assert [number for number, _ in got] == [number for number, _ in want]
    assert got[1][1] > want[1][1], "the rank with fewer rows must have encoded more often"
