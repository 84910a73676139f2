"""Layers: normalization, recurrence, attention, parametrizations, and functions of the user's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.programs.base import Manual, Regression, step, trains
from tests.programs.program import program
from tests.programs.run import Run, images, tokens

_COMPILED = {"also": ("stage2_compile", "stage3_compile")}


_trains = partial(trains, __name__)


def _mlp(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), *middle, nn.Linear(12, 4))


_trains("layer_norm", "LayerNorm.", lambda: _mlp(nn.LayerNorm(12), nn.GELU()), **_COMPILED)
_trains("rms_norm", "RMSNorm.", lambda: _mlp(nn.RMSNorm(12), nn.SiLU()))
_trains("group_norm", "GroupNorm.", lambda: _mlp(nn.GroupNorm(3, 12), nn.ReLU()))
_trains(
    "batch_norm",
    "BatchNorm, with its running statistics.",
    lambda: _mlp(nn.BatchNorm1d(12), nn.Tanh()),
    on_three_ranks=True,
)
_trains("batch_norm_averaging", "BatchNorm with `momentum=None`.", lambda: _mlp(nn.BatchNorm1d(12, momentum=None)))
_trains("prelu", "PReLU: a parameter of one element.", lambda: _mlp(nn.PReLU()))
_trains("weight_norm", "`parametrizations.weight_norm`.", lambda: _mlp(parametrizations.weight_norm(nn.Linear(12, 12))))
_trains("old_weight_norm", "`torch.nn.utils.weight_norm`.", lambda: _mlp(nn.utils.weight_norm(nn.Linear(12, 12))))
_trains(
    "spectral_norm",
    "`parametrizations.spectral_norm`.",
    lambda: _mlp(parametrizations.spectral_norm(nn.Linear(12, 12))),
)
_trains("old_spectral_norm", "`torch.nn.utils.spectral_norm`.", lambda: _mlp(nn.utils.spectral_norm(nn.Linear(12, 12))))
_trains("dropout_of_nothing", "Dropout in evaluation.", lambda: _mlp(nn.Dropout(0.5).eval()))


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def _symmetric() -> nn.Module:
    layer = nn.Linear(12, 12)
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    return _mlp(layer)


_trains("own_parametrization", "A parametrization of the user's own: a symmetric weight.", _symmetric)


@program(**_COMPILED)
class batch_norm_in_images(Regression):
    """Convolutions with BatchNorm, two backwards per step by accumulation."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].repeat_interleave(24, 1).view(-1, 3, 8, 8)
        return F.mse_loss(self(x), batch[1])


@program()
class dropout(Regression):
    """Dropout, with a seed of its own in each step."""

    def build(self) -> nn.Module:
        return _mlp(nn.Dropout(0.3), nn.ReLU())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        torch.manual_seed(10 * batch_idx + self.global_rank)
        return self.loss(batch)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 6, num_layers=2, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(-1, 4, 2))[0][:, -1])


_trains("lstm", "A two-layer LSTM.", _Recurrent, trainer={"max_epochs": 2})


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend, self.head = (
            nn.Linear(2, 8),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.view(-1, 4, 2))
        return self.head((x + self.attend(x, x, x, need_weights=False)[0]).mean(1))


_trains("attention", "MultiheadAttention, whose output projection is read by its parent.", _Attention)


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.embed, self.head = nn.Linear(2, 8), nn.Linear(8, 4)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.view(-1, 4, 2))).mean(1))


_trains("transformer", "A TransformerEncoder of two layers.", _Transformer)


class _Language(nn.Module):
    """An embedding that is also the output's weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids))))


@program(on_three_ranks=True)
def tied_weights(run: Run) -> None:
    """An embedding that is the output's weight, too."""
    run.fit(_language(tied=True), run.loader(make=tokens))


@program()
def embedding_bag(run: Run) -> None:
    """Embeddings of which a batch uses a few rows, with AdamW, which moves all rows."""

    class Bag(Regression):
        def build(self) -> nn.Module:
            return nn.Sequential(nn.EmbeddingBag(16, 8, mode="mean"), nn.Linear(8, 4))

        def loss(self, batch: Any) -> Tensor:
            return self(batch[0]).square().mean() + self(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.01, weight_decay=0.1)

    run.fit(Bag(), run.loader(make=tokens))


def _language(tied: bool) -> Regression:
    class Language(Regression):
        def build(self) -> nn.Module:
            return _Language(tied)

        def loss(self, batch: Any) -> Tensor:
            logits = self(batch[0])[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    return Language()


class _Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(self.block(x)), x, use_reentrant=self.reentrant)
        return self.head(x)


_trains(
    "checkpointed",
    "A block that is used twice and recomputed, without reentering autograd.",
    lambda: _Recomputed(False),
)
_trains(
    "checkpointed_by_reentering", "The same, by reentering autograd.", lambda: _Recomputed(True), reference="single"
)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight.T).square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        inner = 2 * (x @ weight.T) * grad
        return inner @ weight, inner.T @ x


class _OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(6, 8) / 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_Square.apply(x, self.weight))


_trains("own_function", "An `autograd.Function` that saves a parameter.", _OwnFunction, on_three_ranks=True)


@program(on_three_ranks=True)
def own_function_by_parts(run: Run) -> None:
    """An `autograd.Function` in a part of a network that is called by itself; the function saves the weight."""

    class OwnFunctionByParts(Manual):
        def build(self) -> nn.Module:
            return nn.Sequential(nn.Tanh(), _OwnFunction())

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.manual_backward(F.mse_loss(self.net[1](torch.tanh(x)), y))  # type: ignore[index, operator]
            with torch.no_grad():
                self.log("again", self.net[1](x).square().mean(), sync_dist=True)  # type: ignore[index, operator]
            step(self.optimizers())

    run.fit(OwnFunctionByParts(), run.loader(6))


@program()
def own_function_of_a_weight(run: Run) -> None:
    """An `autograd.Function` of a weight, outside of the forward of the weight's layer."""

    class OwnFunctionOfAWeight(Regression):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) + 0.1 * _Square.apply(batch[0], self.net[0].weight).mean()  # type: ignore[index]

    run.fit(OwnFunctionOfAWeight(), run.loader(6))


class _Recompute(torch.autograd.Function):
    """Runs a module, and once more in the backward. Its parameters are arguments, so that they get gradients."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *params: Tensor) -> Tensor:
        ctx.module, ctx.params = module, params
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        return None, *torch.autograd.grad(y, (x, *ctx.params), grad)


class _RecomputedByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_Recompute.apply(self.block, x, *self.block.parameters()))


_trains("recomputed_by_hand", "Checkpointing as some diffusion models write it themselves.", _RecomputedByHand)


@program(on_three_ranks=True)
def recomputed_by_parts(run: Run) -> None:
    """The same, in a part of a network that is called by itself; other weights are used in the function, too."""

    class RecomputedByParts(Manual):
        def build(self) -> nn.Module:
            return nn.Sequential(nn.Tanh(), _RecomputedByHand())

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            part: Any = self.net[1]  # type: ignore[index]
            hidden = _Recompute.apply(part.block, torch.tanh(x), *part.block.parameters())
            self.manual_backward(F.mse_loss(part.head(hidden), y))
            step(self.optimizers())

    run.fit(RecomputedByParts(), run.loader(6))


@program(stays=("net.0.bias",))  # the mean that BatchNorm subtracts has it, too
def batch_norm_validated(run: Run) -> None:
    """BatchNorm, whose running statistics are each rank's own after a batch; validation in mid-epoch and after it."""

    class Normalized(Regression):
        def build(self) -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))

    run.fit(Normalized(), run.loader(4), val=run.loader(3), max_epochs=2, val_check_interval=2)


@program(on_three_ranks=True)
class gradient_penalty(Manual):
    """A gradient penalty: `torch.autograd.grad(create_graph=True)` of the input, then a backward through it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        self.manual_backward(self.loss(batch) + penalty)
        self.log("penalty", penalty, sync_dist=True)
        step(self.optimizers())


@program()
def two_inputs(run: Run) -> None:
    """A siamese network: one module called twice in a forward, on images."""

    class Siamese(Regression):
        def build(self) -> nn.Module:
            return nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4))

        def loss(self, batch: Any) -> Tensor:
            left, right = self(batch[0]), self(batch[0].flip(-1))
            return -F.cosine_similarity(left, right).mean() + F.cross_entropy(left, batch[1])

    run.fit(Siamese(), run.loader(make=images))
