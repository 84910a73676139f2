"""InfoNCE over many embeddings, in the memory of some rows of the similarity matrix."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_zeroplus.losses.ranks import gather_all, number_of_ranks, rows_of_all_ranks


def info_nce(
    queries: Tensor,
    documents: Tensor,
    temperature: float | Tensor = 0.05,
    *,
    symmetric: bool = False,
    label_offset: int = 0,
    cross_rank: bool = False,
    tile_rows: int = 256,
) -> Tensor:
    """InfoNCE: the mean cross-entropy of finding the document of each query among all documents.

    The logits are ``queries @ documents.T / temperature``, and the label of query ``i`` is document
    ``label_offset + i``. All other documents are negatives: in-batch ones, and further rows as hard negatives. Forward
    and backward hold ``tile_rows`` rows of the logits at a time; the backward computes them again. Loss and gradients
    equal those of ``cross_entropy`` on the whole matrix, also the temperature's. They are computed in fp32 at least,
    also under autocast. A backward with ``create_graph=True`` holds all rows. InfoNCE: `van den Oord et al., 2018 <https://arxiv.org/abs/1807.03748>`_.

    Args:
        queries: Embeddings of shape ``(rows, dimensions)``, normalized if the similarity is to be the cosine.
        documents: Embeddings of shape ``(documents, dimensions)``.
        temperature: A number, or a tensor with one element that is learned, such as ``self.log_temperature.exp()``.
        symmetric: Take the mean with the other direction: find the query of each document with a label.
        label_offset: The row of ``documents`` that belongs to the first query. A rank that has gathered the documents
            itself gives the number of documents on the ranks before it.
        cross_rank: Compare this rank's queries with the documents of all ranks, and, if ``symmetric``, its documents
            with all queries: one rank's share of the similarity matrix. Each rank gets the loss of its own rows. Their
            mean over the ranks is the loss of one process with all rows, and so the averaged gradients are that
            process's, also if the ranks have different numbers of rows. It is a collective, and so is its backward.
        tile_rows: Rows of the logits to hold at a time: ``tile_rows * documents * 4`` bytes.

    Returns:
        The loss, a scalar of dtype float32, or float64 for embeddings of that dtype.

    Raises:
        ValueError: If an argument has a wrong shape, type or value; nothing has been computed.
    """
    _check(queries, documents, temperature, label_offset, tile_rows)
    for name, value in (("symmetric", symmetric), ("cross_rank", cross_rank)):
        if not isinstance(value, bool):
            raise ValueError(f"`{name}` must be True or False, not {value!r}.")
    rows = len(queries)
    dtype = torch.promote_types(torch.promote_types(queries.dtype, documents.dtype), torch.float32)
    with torch.autocast(queries.device.type, enabled=False):
        # Before gathering: else the gradients of the ranks would be rounded before they are added.
        queries, documents = queries.to(dtype), documents.to(dtype)
        degree = torch.as_tensor(temperature).to(queries).reshape(())
        found_in, found_in_reverse = documents, queries
        first, first_in_reverse = label_offset, 0
        divisor = float(rows)
        if cross_rank:
            counts = rows_of_all_ranks(documents, queries)
            rank = dist.get_rank() if number_of_ranks() > 1 else 0
            first, first_in_reverse = first + sum(counts[0][:rank]), sum(counts[1][:rank])
            # This rank's share: the ranks' losses are averaged, and some may have more rows than others.
            divisor = sum(counts[1]) / len(counts[1])
            both = [documents, queries] if symmetric else [documents]
            found_in, *rest = gather_all(both, counts[: len(both)])
            found_in_reverse = rest[0] if symmetric else queries
        loss: Tensor = _Tiled.apply(queries, found_in, degree, first, divisor, tile_rows)
        if symmetric:
            labelled = documents[label_offset : label_offset + rows]
            reverse = _Tiled.apply(labelled, found_in_reverse, degree, first_in_reverse, divisor, tile_rows)
            loss = (loss + reverse) / 2
    return loss


def _check(queries: Tensor, documents: Tensor, temperature: Any, label_offset: Any, tile_rows: Any) -> None:
    for name, embeddings in (("queries", queries), ("documents", documents)):
        if not isinstance(embeddings, Tensor) or embeddings.ndim != 2 or not embeddings.is_floating_point():
            what = tuple(embeddings.shape) if isinstance(embeddings, Tensor) else type(embeddings).__name__
            raise ValueError(f"`{name}` must be embeddings of shape (rows, dimensions), not {what}.")
    if queries.shape[1] != documents.shape[1] or len(queries) == 0:
        shapes = f"{tuple(queries.shape)} and {tuple(documents.shape)}"
        raise ValueError(f"`queries` and `documents` must have rows of the same dimensions, not the shapes {shapes}.")
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1 or not temperature.is_floating_point():
            raise ValueError(f"`temperature` must have one element, not the shape {tuple(temperature.shape)}.")
    elif not _is_number(temperature, float) or not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be a positive number, or a tensor with one element, not {temperature!r}.")
    if not _is_number(tile_rows) or tile_rows < 1:
        raise ValueError(f"`tile_rows` must be a positive integer, not {tile_rows!r}.")
    if not _is_number(label_offset) or not 0 <= label_offset <= len(documents) - len(queries):
        raise ValueError(
            f"`label_offset` must leave a document for each query: {label_offset!r} with {len(queries)} queries and"
            f" {len(documents)} documents. With `cross_rank=True` it counts this rank's documents alone."
        )


def _is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, (int, *kinds)) and not isinstance(value, bool)


class _Tiled(torch.autograd.Function):
    """A sum of cross-entropies over the rows of ``queries @ documents.T / temperature``, over ``divisor``.

    At any time one tile of the logits exists: what is done to it is done in place.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, documents: Tensor, temperature: Tensor, first: int, divisor: float, tile_rows: int
    ) -> Tensor:
        normalizers = queries.new_empty(len(queries))
        total = queries.new_zeros(())
        for at in range(0, len(queries), tile_rows):
            tile = queries[at : at + tile_rows]
            logits = (tile / temperature) @ documents.T
            picked = logits[_diagonal(logits, first + at)]
            highest = logits.amax(1)
            normalizer = logits.sub_(highest[:, None]).exp_().sum(1).log_().add_(highest)
            normalizers[at : at + tile_rows] = normalizer
            total += (normalizer - picked).sum()
        ctx.save_for_backward(queries, documents, temperature, normalizers)
        ctx.first, ctx.divisor, ctx.tile_rows = first, divisor, tile_rows
        return total / divisor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, documents, temperature, normalizers = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return *_differentiable(ctx, queries, documents, temperature, grad), None, None, None
        of_queries = torch.empty_like(queries)
        of_documents = torch.zeros_like(documents) if ctx.needs_input_grad[1] else None
        with torch.autocast(queries.device.type, enabled=False):
            for at in range(0, len(queries), ctx.tile_rows):
                rows = slice(at, at + ctx.tile_rows)
                tile = queries[rows] / temperature
                logits = tile @ documents.T
                logits.sub_(normalizers[rows, None]).exp_()  # the softmax
                logits[_diagonal(logits, ctx.first + at)] -= 1
                torch.mm(logits, documents, out=of_queries[rows])
                if of_documents is not None:
                    of_documents.addmm_(logits.T, tile)
            scale = grad / ctx.divisor
            of_queries.mul_(scale / temperature)
            if of_documents is not None:
                of_documents.mul_(scale)
            # The logits are the products over the temperature. A sum over them is one over the queries' gradients.
            of_temperature = -(of_queries * queries).sum() / temperature if ctx.needs_input_grad[2] else None
        return of_queries, of_documents, of_temperature, None, None, None


def _differentiable(
    ctx: Any, queries: Tensor, documents: Tensor, temperature: Tensor, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients with a graph, by the whole matrix."""
    inputs = queries, documents, temperature
    with torch.autocast(queries.device.type, enabled=False):
        logits = (queries / temperature) @ documents.T
        loss = F.cross_entropy(logits, _diagonal(logits, ctx.first)[1], reduction="sum") / ctx.divisor
        needed = [each for each, needs in zip(inputs, ctx.needs_input_grad, strict=False) if needs]
        grads = iter(torch.autograd.grad(loss, needed, grad, create_graph=True))
    return tuple(next(grads) if needs else None for needs in ctx.needs_input_grad[: len(inputs)])


def _diagonal(logits: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Indices of the labels of a tile, whose first row has the label ``first``."""
    rows = torch.arange(len(logits), device=logits.device)
    return rows, rows + first
