"""The inputs of a cached loss in chunks: of so many rows, or of so many tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Encoder = Callable[[Any], Tensor]

#: The key of the tensor, of shape ``(rows, tokens)``, that is not zero where a token is.
MASK = "attention_mask"


class _Cut(NamedTuple):
    """Which rows are in a chunk, and how many of their tokens; None: all."""

    rows: slice | Tensor
    tokens: int | None


class Column:
    """The inputs of one column, in chunks.

    Args:
        number: Of the column, for messages.
        encoder: Encodes a chunk.
        inputs: Of all rows.
        chunk_size: The most rows of a chunk; None: any number.
        chunk_tokens: The most tokens of a chunk, with padding; None: any number.

    Attributes:
        count: The number of chunks.
        runs: The number of times that a chunk is encoded: the other ranks may have more chunks.
    """

    def __init__(
        self, number: int, encoder: Encoder, inputs: Any, chunk_size: int | None, chunk_tokens: int | None
    ) -> None:
        rows = {leaf.shape[0] if leaf.ndim else None for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
        if len(rows) != 1 or None in rows or 0 in rows:
            raise ValueError(
                f"Column {number} of `CachedLoss` must hold tensors with the same positive number of rows, not {rows}."
            )
        self.number = number
        self.encoder = encoder
        self.inputs = inputs
        self.rows = int(next(iter(rows)) or 0)
        self._order: Tensor | None = None
        if chunk_tokens is None:
            assert chunk_size is not None
            starts = range(0, self.rows, chunk_size)
            self._cuts = [_Cut(slice(start, start + chunk_size), None) for start in starts]
        else:
            self._cuts = list(self._by_tokens(chunk_size or self.rows, chunk_tokens))
        self.runs = self.count = len(self._cuts)

    def _by_tokens(self, chunk_size: int, chunk_tokens: int) -> Iterator[_Cut]:
        mask = self.inputs.get(MASK) if isinstance(self.inputs, Mapping) else None
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] == 0:
            raise ValueError(
                f"Column {self.number} of `CachedLoss` must be a dictionary with an `{MASK}` of shape (rows, tokens),"
                f" because `chunk_tokens` is {chunk_tokens}. Without it, give `chunk_size` alone."
            )
        # Up to the last token: padding on the left stays, because positions count from there.
        lengths = ((mask != 0) * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1).clamp(min=1).tolist()
        # The longest first: rows of like lengths need little padding, and too large a chunk fails at once.
        order = sorted(range(self.rows), key=lambda row: -lengths[row])
        self._order = torch.tensor(order)
        start = 0
        while start < self.rows:
            longest = lengths[order[start]]
            rows = self._order[start : start + min(chunk_size, max(chunk_tokens // longest, 1))]
            yield _Cut(rows, longest)
            start += len(rows)

    def chunk(self, number: int) -> Any:
        """One of the chunks; the last one again from :attr:`count` on."""
        rows, tokens = self._cuts[min(number, self.count - 1)]
        chunk = tree_map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) else leaf, self.inputs)
        if tokens is not None:
            shape = self.inputs[MASK].shape
            for key, value in self.inputs.items():
                # Of such a shape are ids, types and positions of tokens. One of floats may be anything.
                if isinstance(value, Tensor) and value.shape == shape and (key == MASK or _is_whole(value)):
                    chunk[key] = chunk[key][:, :tokens]
        return chunk

    def encode(self, number: int) -> Tensor:
        """The embeddings of a chunk."""
        chunk = self.chunk(number)
        embedding = self.encoder(chunk)
        rows = next(leaf.shape[0] for leaf in tree_leaves(chunk) if isinstance(leaf, Tensor))
        if embedding.ndim == 0 or embedding.shape[0] != rows:
            raise ValueError(
                f"The encoder of column {self.number} returned shape {tuple(embedding.shape)} for {rows} rows: return"
                " one embedding per row."
            )
        return embedding

    def join(self, embeddings: list[Tensor]) -> Tensor:
        """Those of all chunks, in the order of the rows."""
        joined = torch.cat(embeddings)
        return joined if self._order is None else joined[self._order.argsort().to(joined.device)]

    def part(self, grad: Tensor, number: int) -> Tensor:
        """A chunk's rows of the gradient of the joined embeddings."""
        rows = self._cuts[number].rows
        return grad[rows if isinstance(rows, slice) else rows.to(grad.device)]


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()
