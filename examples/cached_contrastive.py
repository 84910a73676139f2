"""Large-batch contrastive training in the memory of a small batch, sharded with ZeRO-3.

A text encoder learns to find a function by its description. The data are (signature, docstring) pairs of the Python
code that is installed next to this script; the loss is symmetric InfoNCE with every other pair of the global batch
as a negative, in cached form: `GradCache, Gao et al., 2021 <https://arxiv.org/abs/2101.06983>`_. A cached loss calls
backward many times in a step; each of those gradients has to count exactly once, and one reduction is enough::

    python examples/cached_contrastive.py                    # zeroplus_stage3, two CPU processes
    python examples/cached_contrastive.py --strategy ddp_find_unused_parameters_true     # the same losses

It writes ``history.json`` and ``curves.png`` to ``outputs/cached_contrastive/<strategy>/``.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.core.optimizer import LightningOptimizer
from pair_data import MAX_TOKENS, VOCABULARY, PairData
from quiet import quiet
from report import History, print_report, save_curves, save_history
from text_encoder import PAD, PairModel
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torchmetrics import MetricCollection
from torchmetrics.retrieval import RetrievalMRR, RetrievalRecall

import lightning_zeroplus as zp


class CachedContrastive(LightningModule):
    """Shared text encoder with a cached contrastive loss, in manual optimization.

    Args:
        chunk_size: Texts whose activations are alive at the same time.
        max_steps: Length of the learning rate schedule.
        learning_rate: Its peak.
        seed: Seed of the initial weights.
    """

    def __init__(self, chunk_size: int, max_steps: int, learning_rate: float = 2e-3, seed: int = 0) -> None:
        super().__init__()
        self.automatic_optimization = False
        # The loss needs all embeddings at once, the encoder sees a chunk at a time.
        self.loss = zp.CachedLoss(self.contrast, chunk_size, cross_rank=True)
        self.max_steps = max_steps
        self.learning_rate = learning_rate
        self.seed = seed
        self.model: PairModel | None = None
        self.metrics = MetricCollection({"recall@10": RetrievalRecall(top_k=10), "mrr": RetrievalMRR()})
        self.history = History()
        self.scores = torch.empty(0, 0)
        self._validation: list[tuple[Tensor, Tensor, Tensor]] = []

    def configure_model(self) -> None:
        """Build the network; at ZeRO stage 3 each parameter is sharded as soon as it exists."""
        if self.model is None:
            # Seeded here and not only in main(): what draws random numbers before this point depends on the strategy.
            torch.manual_seed(self.seed)
            self.model = PairModel(VOCABULARY, MAX_TOKENS)

    def configure_optimizers(self) -> tuple[list[Optimizer], list[LRScheduler]]:
        optimizer = AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.01)
        return [optimizer], [LambdaLR(optimizer, self._warmup_and_cosine)]

    def _warmup_and_cosine(self, step: int) -> float:
        warmup = max(1, self.max_steps // 10)
        return min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / self.max_steps)))

    # -- training -------------------------------------------------------------------------------------------------

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """One optimizer step over ``batch``: indices, signature ids and docstring ids of this rank's pairs."""
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, LightningOptimizer) and isinstance(scheduler, LRScheduler)
        _, signatures, docstrings = batch
        by_length = (docstrings != PAD).sum(dim=1).argsort()  # so that short texts are not padded to the longest of all
        loss = self.loss(self, self.encode, docstrings[by_length], signatures[by_length])
        optimizer.step()
        optimizer.zero_grad()

        self.history.add_step(loss.item(), optimizer.param_groups[0]["lr"])
        self.log("loss", loss, prog_bar=True)
        scheduler.step()

    def encode(self, ids: Tensor) -> Tensor:
        """``(texts, tokens)`` token ids, less the padding of all of them, to embeddings ``(texts, width)``."""
        assert self.model is not None
        return self.model.encoder(ids[:, : int((ids != PAD).sum(dim=1).max())])

    def contrast(self, docstrings: Tensor, signatures: Tensor) -> Tensor:
        """Symmetric InfoNCE of the pairs of all ranks: ``(pairs, width)`` each. The scale is learned, too."""
        assert self.model is not None
        scores = self.model.scale().float() * docstrings.float() @ signatures.float().T
        label = torch.arange(len(scores), device=scores.device)
        return 0.5 * (F.cross_entropy(scores, label) + F.cross_entropy(scores.T, label))

    def _gather(self, tensor: Tensor) -> Tensor:
        """``tensor`` of all ranks, along a new first dimension."""
        gathered = self.all_gather(tensor)
        assert isinstance(gathered, Tensor)
        return gathered.view(-1, *tensor.shape)  # a single process has no dimension of ranks

    # -- validation -----------------------------------------------------------------------------------------------

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Embed this rank's share of the validation pairs."""
        assert self.model is not None
        index, signatures, docstrings = batch
        encoder = self.model.encoder
        self._validation.append((index, encoder(docstrings).float(), encoder(signatures).float()))

    def on_validation_epoch_end(self) -> None:
        """Retrieve every docstring's signature among all validation signatures."""
        local = [torch.cat(parts) for parts in zip(*self._validation, strict=True)]
        self._validation.clear()
        index, docstrings, signatures = (self._gather(part).flatten(0, 1) for part in local)
        # The sampler repeats pairs so that ranks have equally many: by index, each is kept once.
        count = int(index.max()) + 1
        queries, answers = (part.new_empty(count, part.shape[1]) for part in (docstrings, signatures))
        queries[index], answers[index] = docstrings, signatures
        self.scores = queries @ answers.T

        rows = torch.arange(self.global_rank, count, self.trainer.world_size, device=self.device)
        columns = torch.arange(count, device=self.device)
        self.metrics.update(
            self.scores[rows].flatten(),
            (rows[:, None] == columns).flatten(),
            indexes=rows.repeat_interleave(count),
        )
        values = self.metrics.compute()
        self.metrics.reset()
        self.history.add_validation(self.trainer.global_step, values["recall@10"].item(), values["mrr"].item())
        self.log_dict(values, prog_bar=True, sync_dist=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--strategy", default="zeroplus_stage3", help="a Lightning strategy, such as ddp")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--max-steps", type=int, default=70)
    parser.add_argument("--validations", type=int, default=5, help="number of validations in the course of training")
    parser.add_argument("--batch-size", type=int, default=256, help="pairs per process")
    parser.add_argument("--chunk-size", type=int, default=128, help="texts per forward and backward")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs", "cached_contrastive"))
    return parser.parse_args()


def main() -> None:
    started = time.monotonic()
    arguments = parse_arguments()
    quiet()
    seed_everything(arguments.seed)
    data = PairData(arguments.output_dir / "data", arguments.batch_size)
    module = CachedContrastive(arguments.chunk_size, arguments.max_steps, seed=arguments.seed)
    trainer = Trainer(
        strategy=arguments.strategy,
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        precision=arguments.precision,
        max_steps=arguments.max_steps,
        num_sanity_val_steps=-1,  # a full validation before the first step: what an untrained encoder retrieves
        val_check_interval=math.ceil(arguments.max_steps / arguments.validations),
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        callbacks=[TQDMProgressBar()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    if trainer.is_global_zero:
        folder = arguments.output_dir / arguments.strategy
        save_history(module.history, folder / "history.json")
        save_curves(module.history, len(module.scores), folder / "curves.png")
        print_report(module.history, module.scores, data.validation)
        print(f"{time.monotonic() - started:.0f} s; curves and history in {folder}")


if __name__ == "__main__":
    main()
