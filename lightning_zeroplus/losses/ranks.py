"""The embeddings of all ranks, with gradients, and the numbers that the ranks agree on before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Whether the loss function has been given the embeddings of all ranks.
_has_all: ContextVar[bool] = ContextVar("_has_all", default=False)


def number_of_ranks() -> int:
    """1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def tell_all(numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """A collective: for each of the numbers, those of all ranks, in rank order. The host waits for the device once."""
    own = torch.tensor(list(numbers), device=device)
    every = own.new_empty(dist.get_world_size(), len(numbers))
    dist.all_gather_into_tensor(every.view(-1), own)
    told: list[list[int]] = every.T.tolist()
    return told


def of_all_ranks(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """A collective: the rows of all ranks, in rank order, without a graph.

    Args:
        rows: Those of this rank.
        counts: The numbers of rows of all ranks.
    """
    own = rows.detach().contiguous()
    if len(set(counts)) == 1:
        every = own.new_empty(sum(counts), *own.shape[1:])
        dist.all_gather_into_tensor(every, own)
        return every
    # It needs equal shapes, and the last batch of an epoch may be smaller on some ranks.
    padded = own.new_zeros(max(counts), *own.shape[1:])
    padded[: own.shape[0]] = own
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


@contextlib.contextmanager
def with_all_embeddings() -> Iterator[None]:
    """Within, the embeddings are those of all ranks: to gather them once more is refused."""
    token = _has_all.set(True)
    try:
        yield
    finally:
        _has_all.reset(token)


def rows_of_all_ranks(*embeddings: Tensor) -> list[list[int]]:
    """A collective: for each tensor, the numbers of rows of all ranks, in rank order.

    Raises:
        ValueError: If the embeddings are those of all ranks already.
    """
    if _has_all.get():
        raise ValueError(
            "`CachedLoss(..., cross_rank=True)` gives its `loss_fn` the embeddings of all ranks. The `loss_fn` must not"
            " gather them once more, by `info_nce(..., cross_rank=True)` or `gather_rows`: leave one of them out."
        )
    rows = [len(embedding) for embedding in embeddings]
    return [[count] for count in rows] if number_of_ranks() == 1 else tell_all(rows, embeddings[0].device)


def gather_all(embeddings: Sequence[Tensor], counts: Sequence[list[int]]) -> tuple[Tensor, ...]:
    """As :func:`gather_rows`, for several tensors, whose numbers of rows on all ranks are known."""
    return tuple(embeddings) if number_of_ranks() == 1 else _GatherRows.apply(counts, *embeddings)


def gather_rows(embeddings: Tensor) -> Tensor:
    """The embeddings of all ranks, in rank order, for a loss that compares this rank's rows with all of them.

    A collective, and so is its backward. Each rank may have another number of rows. The gradient of a row is the sum of
    its gradients on all ranks. So if each rank's loss is the mean over its own rows, and all ranks have as many, then
    averaging the gradients of the parameters over the ranks, as every strategy does, gives the gradient of one process
    with all rows. With one process it returns its argument::

        scores = queries @ zp.losses.gather_rows(documents).T  # (rows of this rank, rows of all ranks)

    Args:
        embeddings: This rank's embeddings, of shape ``(rows, ...)``. The other ranks have the same shape but for the
            rows.

    Returns:
        Embeddings of shape ``(rows of all ranks, ...)``.

    Raises:
        ValueError: In a ``CachedLoss`` with ``cross_rank=True``, whose embeddings are those of all ranks already.
    """
    return gather_all([embeddings], rows_of_all_ranks(embeddings))[0]


class _GatherRows(torch.autograd.Function):
    """One function for several tensors, so that the ranks come to their collectives in the same order."""

    @staticmethod
    def forward(ctx: Any, counts: Sequence[list[int]], *embeddings: Tensor) -> tuple[Tensor, ...]:
        ctx.counts = counts
        return tuple(of_all_ranks(each, count) for each, count in zip(embeddings, counts, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *_SumOfOwnRows.apply(ctx.counts, *grads)


class _SumOfOwnRows(torch.autograd.Function):
    """The opposite: this rank's rows, summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, counts: Sequence[list[int]], *grads: Tensor) -> tuple[Tensor, ...]:
        ctx.counts = counts
        return tuple(_sum_of_own_rows(each, count) for each, count in zip(grads, counts, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *_GatherRows.apply(ctx.counts, *grads)


def _sum_of_own_rows(grad: Tensor, counts: list[int]) -> Tensor:
    """This rank's rows of the sum of all ranks' gradients, added in rank order, in fp32 at least."""
    own, wide = counts[dist.get_rank()], grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
    # Rows of any number for each rank, and half the bytes of an all-reduce.
    arrived = wide.new_empty(len(counts) * own, *grad.shape[1:])
    dist.all_to_all_single(arrived, wide, [own] * len(counts), counts)
    return arrived.view(len(counts), own, *grad.shape[1:]).sum(0).to(grad.dtype)
