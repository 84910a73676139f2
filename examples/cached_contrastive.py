"""Large-batch contrastive training in the memory of a small batch, sharded with ZeRO-3.

A text encoder learns to find a function by its description. The data are (signature, docstring) pairs of the Python
code that is installed next to this script; the loss is symmetric InfoNCE with every other pair of the global batch
as a negative, in cached form: `GradCache, Gao et al., 2021 <https://arxiv.org/abs/2101.06983>`_. A cached loss calls
backward many times in a step, and each of those gradients has to count exactly once::

    python examples/cached_contrastive.py                    # zeroplus_stage3, two CPU processes
    python examples/cached_contrastive.py --strategy ddp     # the same losses

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

import lightning_zeroplus  # noqa: F401  (registers the zeroplus_* strategies)


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
        self.chunk_size = chunk_size
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
        assert self.model is not None
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, LightningOptimizer) and isinstance(scheduler, LRScheduler)
        _, signatures, docstrings = batch
        texts = torch.cat([docstrings, signatures])
        by_length = (texts != PAD).sum(dim=1).argsort()  # so that short texts are not padded to the longest of all
        chunks = [without_padding(chunk) for chunk in texts[by_length].split(self.chunk_size)]

        # 1. Embed everything without a graph: the activations of one chunk at a time.
        with torch.no_grad():
            embeddings = torch.cat([self.model.encoder(chunk) for chunk in chunks])[by_length.argsort()]
            scale = self.model.scale()

        # 2. The loss needs all embeddings and no network: its gradient stops at them. This is the cache.
        loss, embedding_grad, scale_grad = self._loss_and_gradients(embeddings, scale)

        # 3. Carry the cached gradient through the network, chunk by chunk: the gradient of (e * g).sum() with respect
        # to the parameters is (de/dparameters) g. The scale is one more cached quantity, spread over the chunks
        # because DDP expects every backward to reach every parameter.
        for chunk, grad in zip(chunks, embedding_grad[by_length].split(self.chunk_size), strict=True):
            surrogate = (self.model.encoder(chunk) * grad).sum()
            surrogate = surrogate + (self.model.scale() * scale_grad).sum() / len(chunks)
            self.manual_backward(surrogate)
        optimizer.step()
        optimizer.zero_grad()

        global_loss = self._gather(loss).mean()
        self.history.add_step(global_loss.item(), optimizer.param_groups[0]["lr"])
        self.log("loss", global_loss, prog_bar=True)
        scheduler.step()

    def _loss_and_gradients(self, embeddings: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of this rank's pairs against all ranks' pairs, and the gradients to carry on.

        With ``W`` ranks and ``l_s`` the mean loss of rank ``s``'s pairs, the large-batch loss is ``L = sum_s l_s / W``.
        Rank ``r``'s embeddings ``e_r`` are negatives on every rank, so ``dL/de_r = sum_s dl_s/de_r / W``. The strategy
        averages parameter gradients over ranks, that is, it divides by ``W`` once; what each rank has to feed into it
        is therefore ``sum_s dl_s/de_r``. The backward of a differentiable all-gather yields just that: it sums the
        gradients that all ranks have for ``e_r``. The scale is on every rank the same, so ``dl_r/dscale`` is enough:
        its average over the ranks is ``dL/dscale``.

        Args:
            embeddings: ``(2 * pairs, width)``: docstrings, then signatures.
            scale: ``(1,)`` inverse temperature.

        Returns:
            ``l_r``, ``sum_s dl_s/de_r`` in the shape of ``embeddings``, and ``dl_r/dscale``.
        """
        embeddings, scale = embeddings.float().requires_grad_(), scale.float().requires_grad_()
        docstrings, signatures = embeddings.chunk(2)
        everywhere = self._gather(embeddings, sync_grads=True).unflatten(1, (2, -1))
        all_docstrings, all_signatures = everywhere.transpose(0, 1).flatten(1, 2)
        label = self.global_rank * len(docstrings) + torch.arange(len(docstrings), device=self.device)
        loss = 0.5 * (
            F.cross_entropy(scale * docstrings @ all_signatures.T, label)
            + F.cross_entropy(scale * signatures @ all_docstrings.T, label)
        )
        embedding_grad, scale_grad = torch.autograd.grad(loss, (embeddings, scale))
        return loss.detach(), embedding_grad, scale_grad

    def _gather(self, tensor: Tensor, sync_grads: bool = False) -> Tensor:
        """``tensor`` of all ranks, along a new first dimension."""
        gathered = self.all_gather(tensor, sync_grads=sync_grads)
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


def without_padding(ids: Tensor) -> Tensor:
    """``(texts, tokens)`` token ids, cut to the longest text."""
    return ids[:, : int((ids != PAD).sum(dim=1).max())]


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
