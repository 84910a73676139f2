"""`zp.CachedLoss` and `zp.losses.info_nce`, compared with an ordinary loss of whole batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_zeroplus as zp
from tests.programs.base import Manual
from tests.programs.program import program
from tests.programs.run import Run

_DDP = "ddp_find_unused_parameters_true"
TOKENS, WORDS = 12, 16


def _is_plain(run: Run) -> bool:
    return run.strategy.startswith(("ddp", "single"))


def _cross_entropy(queries: Tensor, documents: Tensor, temperature: Tensor) -> Tensor:
    """Both directions, on the whole matrix."""
    scores, labels = queries @ documents.T / temperature, torch.arange(len(queries), device=queries.device)
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


class _Contrast(Manual):
    """Two towers and a learnt temperature.

    Args:
        plain: Encode whole batches, and backpropagate the ordinary loss.
        across: The negatives are those of all ranks.
        sizes: Of the chunks.
    """

    def __init__(self, plain: bool, across: bool = False, **sizes: Any) -> None:
        super().__init__()
        self.plain, self.across = plain, across
        self.cached = zp.CachedLoss(self.of_embeddings, **sizes)

    def build(self) -> nn.Module:
        self.log_temperature = nn.Parameter(torch.tensor(-1.0))
        towers = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6)) for _ in range(2)]
        return nn.ModuleList(towers)

    def towers(self) -> list[Any]:
        return [lambda chunk, tower=tower: F.normalize(tower(chunk), dim=-1) for tower in self.net]  # type: ignore

    def of_embeddings(self, queries: Tensor, documents: Tensor) -> Tensor:
        temperature = self.log_temperature.exp()
        if self.plain:
            return _cross_entropy(queries, documents, temperature)
        options: Any = {"symmetric": True, "cross_rank": self.across, "tile_rows": 3}
        return zp.losses.info_nce(queries, documents, temperature, **options)

    def columns(self, batch: Any) -> list[Any]:
        return [batch[0], torch.tanh(batch[1] @ batch[1].new_ones(4, 8).cumsum(1)) + batch[0].roll(1, 1)]

    def contrast(self, batch: Any) -> Tensor:
        """The loss; with gradients enabled it is differentiated."""
        if not self.plain:
            return self.cached(self, self.towers(), *self.columns(batch))
        loss = self.of_embeddings(*(tower(x) for tower, x in zip(self.towers(), self.columns(batch), strict=True)))
        if torch.is_grad_enabled():
            self.manual_backward(loss)
        return loss.detach()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.log("loss", self.contrast(batch), sync_dist=True)
        optimizer.step()
        optimizer.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # Not by rows, of which the ranks may have unequal numbers: its mean over the ranks is that of all rows.
        self.log("val_loss", self.contrast(batch), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.02)


@program(on_three_ranks=True)
def cached_contrast(run: Run) -> None:
    """`CachedLoss` in chunks, `info_nce` with a learnt temperature and the negatives of one rank; it is validated."""
    module = _Contrast(_is_plain(run), chunk_size=[3, 5])
    run.fit(module, run.loader(3, rows=8), val=run.loader(2, rows=8), max_epochs=2)


@program(reference="single", on_three_ranks=True)
def cached_contrast_of_all_ranks(run: Run) -> None:
    """`CachedLoss` and `info_nce(cross_rank=True)`: the negatives of all ranks, whose matrix the ranks share."""
    module = _Contrast(_is_plain(run), across=True, chunk_size=3)
    run.fit(module, run.loader(3, rows=7), val=run.loader(2, rows=7), max_epochs=2)


@program(reference="single")
def cached_loss_across_ranks(run: Run) -> None:
    """`CachedLoss(cross_rank=True)` with a loss of torch's own: each rank has the loss of all rows."""

    class Whole(_Contrast):
        def of_embeddings(self, queries: Tensor, documents: Tensor) -> Tensor:
            return _cross_entropy(queries, documents, self.log_temperature.exp())

    module = Whole(_is_plain(run), chunk_size=3, cross_rank=True)
    run.fit(module, run.loader(3, rows=7), val=run.loader(2, rows=7), max_epochs=2)


@program()
def cached_contrast_accumulated(run: Run) -> None:
    """Two cached losses before a step, with clipping, a schedule and the inspected gradient of the temperature."""

    class Accumulates(_Contrast):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.log("loss", self.contrast(batch), sync_dist=True)
            if batch_idx % 2:
                self.log("grad", self.log_temperature.grad, sync_dist=True)  # type: ignore[arg-type]
                self.clip_gradients(optimizer, 0.3, "norm")
                optimizer.step()
                optimizer.zero_grad()
                self.lr_schedulers().step()  # type: ignore[union-attr]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.2, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]

    run.fit(Accumulates(_is_plain(run), chunk_size=3), run.loader(4, rows=8), max_epochs=2)


@program(reference=_DDP, stays=("net.1.*",))
def cached_contrast_with_a_frozen_tower(run: Run) -> None:
    """A column of `CachedLoss` whose encoder is frozen: LiT, with the temperature in a group of its own."""

    class Locked(_Contrast):
        def build(self) -> nn.Module:
            net: Any = super().build()
            net[1].requires_grad_(False)
            return net

        def configure_optimizers(self) -> Any:
            groups = [{"params": self.net[0].parameters()}, {"params": [self.log_temperature], "lr": 0.1}]  # type: ignore
            return torch.optim.AdamW(groups, 0.02)

    run.fit(Locked(_is_plain(run), chunk_size=3), run.loader(3, rows=8), max_epochs=2)


@program(reference="single")
def cached_contrast_resumed(run: Run) -> None:
    """A training with `CachedLoss` and the negatives of all ranks, saved and resumed."""
    made = [_Contrast(_is_plain(run), across=True, chunk_size=4) for _ in range(2)]
    run.fit(made[0], run.loader(3, rows=6)).save_checkpoint(run.folder / "one.ckpt")
    run.fit(made[1], run.loader(3, rows=6), ckpt_path=run.folder / "one.ckpt", max_epochs=2)


class _Texts(_Contrast):
    """One encoder of texts of varying length: the mean of their words, behind two layers."""

    def build(self) -> nn.Module:
        self.log_temperature = nn.Parameter(torch.tensor(-1.0))
        return nn.ModuleDict(
            {
                "words": nn.Embedding(WORDS, 8),
                "places": nn.Embedding(TOKENS, 8),
                "layers": nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6)),
            }
        )

    def encode(self, text: Any) -> Tensor:
        ids, mask = text["input_ids"], text["attention_mask"]
        net: Any = self.net
        tokens = net["layers"](net["words"](ids) + net["places"](torch.arange(ids.shape[1], device=ids.device)))
        return F.normalize((tokens * mask[..., None]).sum(1), dim=-1)

    def towers(self) -> list[Any]:
        return [self.encode, self.encode]

    def columns(self, batch: Any) -> list[Any]:
        return [{"input_ids": ids, "attention_mask": mask} for ids, mask in (batch[:2], batch[2:])]


def _texts(generator: torch.Generator, rows: int) -> tuple[Tensor, ...]:
    """Ids and masks of queries and of documents, ``(rows, 12)``; a rank's batch has up to three rows more."""
    rows += int(torch.randint(4, (), generator=generator))
    made: list[Tensor] = []
    for _ in range(2):
        longest = int(torch.randint(2, TOKENS + 1, (), generator=generator))
        lengths = torch.randint(1, longest + 1, (rows, 1), generator=generator)
        mask = (torch.arange(TOKENS) < lengths).long()
        made += [torch.randint(WORDS, (rows, TOKENS), generator=generator) * mask, mask]
    return tuple(made)


@program(reference="single", on_three_ranks=True)
def cached_texts(run: Run) -> None:
    """`CachedLoss(chunk_tokens=...)`: texts of varying length; the ranks have unequal rows and numbers of chunks."""
    module = _Texts(_is_plain(run), across=True, chunk_tokens=[20, 30])
    run.fit(module, run.loader(4, 5, _texts), val=run.loader(2, 5, _texts), max_epochs=2)


@program(reference=_DDP)
def cached_texts_of_one_rank(run: Run) -> None:
    """`CachedLoss(chunk_tokens=...)` with the negatives of one rank: the ranks have unequal numbers of chunks."""
    run.fit(_Texts(_is_plain(run), chunk_tokens=20, chunk_size=4), run.loader(4, 5, _texts), max_epochs=2)


@program(precision="bf16-true")
def cached_contrast_in_bf16(run: Run) -> None:
    """`CachedLoss` and `info_nce` with weights of bf16, by SGD: Adam would amplify the rounding."""

    class Plain(_Contrast):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.2)

    run.fit(Plain(_is_plain(run), chunk_size=3), run.loader(3, rows=8), max_epochs=2)
