"""A small transformer that embeds a text, written so that ZeRO-3 can shard it.

Two habits make a network safe under ZeRO-3, which gathers a module's parameters around that module's own ``forward``
and partitions them at the end of that module's own ``__init__``:

* a parameter is initialized by the module that owns it, never by its parent;
* a parameter is used by the ``forward`` of the module that owns it, never by another module.

``nn.MultiheadAttention`` breaks both for its ``out_proj``; hence the attention below is built on ``nn.Linear``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PAD = 0


class TextEncoder(nn.Module):
    """Token ids to unit vectors: embedding, pre-norm transformer blocks, mean over the tokens.

    There is no dropout: a cached loss runs every forward twice and needs the same result both times.

    Args:
        vocabulary: Number of token ids.
        max_tokens: Longest text, in tokens.
        width: Size of the residual stream and of the embeddings.
        depth: Number of blocks.
        heads: Attention heads; divides ``width``.
    """

    def __init__(self, vocabulary: int, max_tokens: int, width: int = 128, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        """Embed texts.

        Args:
            ids: ``(texts, tokens)`` token ids, padded with ``PAD``.

        Returns:
            ``(texts, width)`` vectors of length 1.
        """
        is_token = ids != PAD
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        mask = is_token[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        weight = is_token.unsqueeze(-1).to(x.dtype)
        mean = (self.norm(x) * weight).sum(dim=1) / weight.sum(dim=1)
        return F.normalize(mean, dim=-1)


class Block(nn.Module):
    """Self-attention and a two-layer perceptron, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``x``: ``(texts, tokens, width)``; ``mask``: ``(texts, 1, 1, tokens)``, True for a token to attend to."""
        texts, tokens, width = x.shape
        qkv = self.query_key_value(self.norm(x)).view(texts, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.project(attended.transpose(1, 2).reshape(texts, tokens, width))
        return x + self.perceptron(x)


class LogitScale(nn.Module):
    """The learned inverse temperature of the contrastive loss, in a module of its own so that ZeRO-3 gathers it."""

    def __init__(self, initial: float = 1 / 0.07) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((1,), math.log(initial)))

    def forward(self) -> Tensor:
        """The scale, shape ``(1,)``; at most 100, as in CLIP."""
        return self.log_scale.exp().clamp(max=100.0)


class PairModel(nn.Module):
    """The encoder, shared by both sides of a pair, and the scale of their similarity."""

    def __init__(self, vocabulary: int, max_tokens: int) -> None:
        super().__init__()
        self.encoder = TextEncoder(vocabulary, max_tokens)
        self.scale = LogitScale()
