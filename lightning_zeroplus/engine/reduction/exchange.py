"""One reduction of many local gradients: pack a bucket, run one collective, give this rank its averaged partition.

Each gradient element is read once, into its place in the bucket. In the bucket the partitions of the ranks lie one
after the other, so that a reduce-scatter gives each rank its own. On gloo this is an all-to-all and a sum
(``gradients/ranks/gloo.py``). If equal parts would need too much padding, the same bucket is all-reduced, and the rank
reads its part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from torch import Tensor

from lightning_zeroplus.gradients.ranks import gloo


class Piece(NamedTuple):
    """Consecutive elements of one parameter's gradient that belong to one rank's partition.

    Attributes:
        param: The parameter, by its index in ``module.parameters()``.
        start: The first element, in the flattened gradient.
        numel: The number of elements.
    """

    param: int
    start: int
    numel: int


#: Gradients of fewer elements on average are joined first and divided together: a call for each costs more than a pass.
_SMALL = 4096
#: The pieces of each rank that one collective reduces.
Bucket = list[list[Piece]]


def by_columns(owned: Sequence[Sequence[Piece]], elements: int) -> Iterator[Bucket]:
    """Cut the pieces of every rank, laid end to end, at the same positions: a bucket has equally long parts.

    Args:
        owned: The pieces of each rank.
        elements: Most elements in a bucket.
    """
    width = max(1, elements // len(owned))
    rest = [list(reversed(pieces)) for pieces in owned]
    while any(rest):
        yield [_cut(pieces, width) for pieces in rest]


def by_shares(owned: Sequence[Sequence[Piece]], elements: int) -> Iterator[Bucket]:
    """Cut the pieces of every rank into as few parts as buckets need: each bucket has the same share of every rank's.

    Args:
        owned: The pieces of each rank.
        elements: Most elements in a bucket, but for one per rank.
    """
    lengths = [sum(piece.numel for piece in pieces) for pieces in owned]
    buckets = max(-(-sum(lengths) // elements), 1)
    rest = [list(reversed(pieces)) for pieces in owned]
    while any(rest):
        yield [_cut(pieces, -(-length // buckets)) for pieces, length in zip(rest, lengths, strict=True)]


def by_elements(owned: Sequence[Sequence[Piece]], elements: int) -> Iterator[Bucket]:
    """Fill buckets to the last element, whichever ranks own the elements.

    Args:
        owned: The pieces of each rank.
        elements: Most elements in a bucket.
    """
    rest = [list(reversed(pieces)) for pieces in owned]
    while any(rest):
        bucket: Bucket = []
        space = elements
        for pieces in rest:
            bucket.append(_cut(pieces, space))
            space -= sum(piece.numel for piece in bucket[-1])
        yield bucket


def _cut(reversed_pieces: list[Piece], width: int) -> list[Piece]:
    taken: list[Piece] = []
    while reversed_pieces and width:
        piece = reversed_pieces.pop()
        if piece.numel > width:
            reversed_pieces.append(Piece(piece.param, piece.start + width, piece.numel - width))
            piece = piece._replace(numel=width)
        taken.append(piece)
        width -= piece.numel
    return taken


def by_parameters(owned: Iterable[Sequence[Piece]], elements: int) -> Iterator[Bucket]:
    """Fill buckets with whole parameters.

    Args:
        owned: For each parameter, the piece of each rank.
        elements: Most elements in a bucket, unless one parameter alone has more.
    """
    bucket: Bucket = []
    filled = 0
    for pieces in owned:
        numel = sum(piece.numel for piece in pieces)
        if bucket and filled + numel > elements:
            yield bucket
            bucket, filled = [], 0
        bucket = bucket or [[] for _ in pieces]
        for own, piece in zip(bucket, pieces, strict=True):
            own.append(piece)
        filled += numel
    if bucket:
        yield bucket


def _part(grad: Tensor | None, piece: Piece) -> Tensor | None:
    if grad is None:
        return None
    flat = grad.reshape(-1)
    return flat if piece.numel == flat.numel() else flat.narrow(0, piece.start, piece.numel)


#: For each rank its parts of the gradients, in the order of its pieces; None where there is no gradient.
_Parts = Sequence[Sequence[Tensor | None]]


def _parts(bucket: Bucket, grads: Mapping[int, Tensor], by_parameters: bool = False) -> _Parts:
    if not by_parameters:
        return [[_part(grads.get(piece.param), piece) for piece in pieces] for pieces in bucket]
    of_params: list[Sequence[Tensor | None]] = []  # one call for all ranks' parts of a gradient
    for pieces in zip(*bucket, strict=True):
        grad = grads.get(pieces[0].param)
        none = [None] * len(pieces)
        of_params.append(none if grad is None else grad.reshape(-1).split([piece.numel for piece in pieces]))
    return list(zip(*of_params, strict=True))


def stretches(
    pieces: Sequence[Piece], places: Mapping[int, tuple[int, int, int]]
) -> Iterator[tuple[int, int, int, int, list[Piece]]]:
    """Join pieces that follow each other in a bucket and in a partition too.

    Args:
        pieces: In the order in which they lie in the bucket, without a gap.
        places: Of each parameter: the group, the first element of its piece, and where that is in the partition.

    Yields:
        Per stretch the group, where it begins in the partition and in the bucket, its length, and its pieces.
    """
    group, there, here, numel = -1, 0, 0, 0
    members: list[Piece] = []
    for piece in pieces:
        own, start, offset = places[piece.param]
        at = offset + piece.start - start
        if members and (own, at) != (group, there + numel):
            yield group, there, here, numel, members
            here, numel, members = here + numel, 0, []
        if not members:
            group, there = own, at
        members.append(piece)
        numel += piece.numel
    if members:
        yield group, there, here, numel, members


class Exchange:
    """Averages buckets over a process group.

    Args:
        group: The process group.
        dtype: The dtype on the wire.
        device: Where the gradients are.
        scatter: Prefer reduce-scatter, which moves half the bytes of an all-reduce. All-reduce is used anyway if the
            padding to equal parts would cost as much. On gloo the parts need no padding; its own reduce-scatter, which
            is slower than its all-reduce, is never used.

    Attributes:
        dtype: The dtype on the wire.
        needs_no_padding: Whether the parts of the ranks may have any lengths.
    """

    def __init__(self, group: Any, dtype: torch.dtype, device: torch.device, scatter: bool) -> None:
        self._group = group
        self.dtype = dtype
        self._device = device
        self._world = dist.get_world_size(group=group)
        self._rank = dist.get_rank(group=group)
        self._scatter = scatter and torch.distributed.get_backend(group) != "gloo"
        self.needs_no_padding = scatter and gloo.suits(group, device)
        self._buffer = torch.empty(0, dtype=dtype, device=device)
        # One kernel for many tensors and a second pass over the bucket; on the CPU the second pass costs more.
        self._launches_are_dear = device.type != "cpu"

    def cut(self, owned: Sequence[Sequence[Piece]], elements: int) -> Iterator[Bucket]:
        """Fill buckets in the way that suits the collective."""
        lengths = [sum(piece.numel for piece in pieces) for pieces in owned]
        if self.needs_no_padding:
            return by_shares(owned, elements)
        return by_columns(owned, elements) if self._scatters(lengths) else by_elements(owned, elements)

    def _scatters(self, lengths: Sequence[int]) -> bool:
        return self._scatter and max(lengths) * self._world < 2 * sum(lengths)

    def average(
        self, bucket: Bucket, grads: Mapping[int, Tensor], by_parameters: bool = False
    ) -> list[tuple[Piece, Tensor]]:
        """Average the gradients of a bucket over the ranks.

        Args:
            bucket: The pieces of each rank; the same on all ranks.
            grads: This rank's gradients by index of the parameter, in any shape; a missing one counts as zero.
            by_parameters: The bucket is of :func:`by_parameters`, and equal parts of a parameter, of which the last may
                be smaller, belong to one rank after the other. One kernel then packs all parts of a parameter.

        Returns:
            This rank's pieces and their averages: one-dimensional, in the dtype on the wire. The next bucket, of any
            exchange, overwrites them.
        """
        own, slots = self._average(bucket, grads, by_parameters)
        averages = own.narrow(0, 0, sum(slots)).split(slots)
        return [
            (piece, average if average.numel() == piece.numel else average.narrow(0, 0, piece.numel))
            for piece, average in zip(bucket[self._rank], averages, strict=True)
        ]

    def average_own(self, bucket: Bucket, grads: Mapping[int, Tensor]) -> Tensor:
        """The same as one tensor, in which this rank's pieces lie one after the other; what follows them is padding."""
        return self._average(bucket, grads, False)[0]

    def average_into(self, place: Tensor, bucket: Bucket, grads: Mapping[int, Tensor]) -> None:
        """The same, written to ``place``: each gradient element of this rank's own is written once, and nowhere else.

        Args:
            place: Of :attr:`dtype`, one-dimensional and contiguous, with the elements of this rank's pieces.
            bucket: As in :meth:`average`, where the parts need no padding; see :attr:`needs_no_padding`.
            grads: As in :meth:`average`.
        """
        widths = [sum(piece.numel for piece in pieces) for pieces in bucket]
        others = [*bucket[: self._rank], *bucket[self._rank + 1 :]]
        numels = [*widths[: self._rank], *widths[self._rank + 1 :]]
        flat = self._space(sum(numels))
        self._pack(place, [0], [bucket[self._rank]], grads)
        self._pack(flat, list(accumulate(numels[:-1], initial=0)), others, grads)
        gloo.reduction.add_parts((place, flat), widths, self._group)

    def _average(self, bucket: Bucket, grads: Mapping[int, Tensor], by_parameters: bool) -> tuple[Tensor, list[int]]:
        in_rows = by_parameters and not self.needs_no_padding
        if in_rows:
            slots = [max(piece.numel for piece in pieces) for pieces in zip(*bucket, strict=True)]
            widths = [sum(slots)] * self._world
        else:
            slots = [piece.numel for piece in bucket[self._rank]]
            widths = [sum(piece.numel for piece in pieces) for pieces in bucket]
        width, total = max(widths), sum(widths)
        scatter = self._scatters(widths)
        starts = [width * rank if scatter else sum(widths[:rank]) for rank in range(self._world)]
        flat = self._space(width * self._world if scatter else total)
        if in_rows:
            self._pack_parameters(flat.view(self._world, width), slots, bucket, grads)
        else:
            self._pack(flat, starts, bucket, grads, by_parameters)
        own = flat.narrow(0, starts[self._rank], width if scatter else widths[self._rank])
        if scatter:
            dist.reduce_scatter_fn(own, flat, group=self._group)
        elif self.needs_no_padding:
            gloo.reduction.reduce_parts(flat, widths, self._group)
        else:
            dist.all_reduce(flat, group=self._group)
        return own, slots

    def _space(self, numel: int) -> Tensor:
        if self.needs_no_padding:
            return gloo.packed.space(numel, self.dtype)
        if self._buffer.numel() < numel:
            self._buffer = torch.empty(numel, dtype=self.dtype, device=self._device)
        return self._buffer.narrow(0, 0, numel)

    def _pack(
        self,
        flat: Tensor,
        starts: Sequence[int],
        bucket: Bucket,
        grads: Mapping[int, Tensor],
        by_parameters: bool = False,
    ) -> None:
        zeros: list[Tensor] = []
        places: list[Tensor] = []
        parts: list[Tensor] = []
        of_ranks = zip(starts, [*starts[1:], flat.numel()], bucket, _parts(bucket, grads, by_parameters), strict=True)
        for at, end, pieces, found in of_ranks:
            numels = [piece.numel for piece in pieces]
            filled = sum(numels)
            own, padding = flat.narrow(0, at, end - at).split([filled, end - at - filled])
            alike = [part for part in found if part is not None and part.dtype == flat.dtype]
            if not self._launches_are_dear and len(alike) == len(found) and filled < _SMALL * len(pieces):
                torch.cat(alike, out=own).div_(self._world)
            else:
                for part, place in zip(found, own.split(numels), strict=True):
                    if part is None:
                        zeros.append(place)
                    else:
                        places.append(place)
                        parts.append(part)
            if padding.numel():
                zeros.append(padding)
        if zeros:
            torch._foreach_zero_(zeros)
        if self._launches_are_dear:
            if parts:
                torch._foreach_copy_(places, parts)
            flat.div_(self._world)
        else:
            for place, part in zip(places, parts, strict=True):
                self._divide(part, place)

    def _pack_parameters(self, rows: Tensor, slots: Sequence[int], bucket: Bucket, grads: Mapping[int, Tensor]) -> None:
        """Pack parameters of which each rank has an equal part, into the rank's row."""
        if any(piece.numel < slot for pieces in bucket for piece, slot in zip(pieces, slots, strict=True)):
            rows.zero_()  # what is not filled would be reduced as it is
        at = 0
        for slot, piece in zip(slots, bucket[0], strict=True):
            place, at = rows.narrow(1, at, slot), at + slot
            grad = grads.get(piece.param)
            if grad is None:
                place.zero_()
            elif slot:
                parts = grad.reshape(-1)
                full = parts.numel() // slot
                rest = parts.numel() - full * slot
                self._divide(parts.narrow(0, 0, full * slot).view(full, slot), place.narrow(0, 0, full))
                if rest:
                    self._divide(parts.narrow(0, full * slot, rest), place[full].narrow(0, 0, rest))

    def _divide(self, part: Tensor, place: Tensor) -> None:
        # Divide before the sum, as upstream does: in fp16 the sum could overflow.
        if part.dtype == place.dtype:
            torch.div(part, self._world, out=place)
        else:
            place.copy_(part).div_(self._world)
