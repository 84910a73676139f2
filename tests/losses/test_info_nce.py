"""InfoNCE by tiles: the plain loss's value and gradients, with the memory of a tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lightning_zeroplus as zp
from lightning_zeroplus.losses.ranks import with_all_embeddings

#: Of gradients in fp64, relative to their norm: what rounding leaves, on whatever processor.
BOUND = 1e-12
ROWS, EXTRA, WIDTH = 48, 16, 24


def _plain(queries: Tensor, documents: Tensor, temperature: Any, symmetric: bool = False, offset: int = 0) -> Tensor:
    scores = queries @ documents.T / temperature
    labels = torch.arange(offset, offset + len(queries))
    loss = F.cross_entropy(scores, labels)
    if not symmetric:
        return loss
    return (loss + F.cross_entropy(scores[:, labels].T, torch.arange(len(queries)))) / 2


def _inputs(rows: int = ROWS, extra: int = EXTRA, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Queries, documents that resemble them, and a temperature: leaves."""
    generator = torch.Generator().manual_seed(seed)
    queries = F.normalize(torch.randn(rows, WIDTH, generator=generator), dim=1)
    documents = torch.cat([queries, torch.randn(extra, WIDTH, generator=generator)])
    documents = F.normalize(documents + 0.3 * torch.randn(documents.shape, generator=generator), dim=1)
    return [each.to(dtype).requires_grad_() for each in (queries, documents, torch.tensor(0.07))]


def _error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("tile_rows", [1, 7, ROWS, 1000])
@pytest.mark.parametrize(("symmetric", "offset"), [(False, 0), (True, 0), (True, 5)])
def test_it_is_the_plain_loss(symmetric: bool, offset: int, tile_rows: int) -> None:
    ours, plain = _inputs(dtype=torch.float64), _inputs(dtype=torch.float64)
    options: Any = {"symmetric": symmetric, "label_offset": offset, "tile_rows": tile_rows}
    loss, want = zp.losses.info_nce(*ours, **options), _plain(*plain, symmetric, offset)
    assert abs((loss - want).item()) <= BOUND * want.item()
    (3 * loss).backward()  # a loss scale, for example
    (3 * want).backward()
    for got, expected in zip(ours, plain, strict=True):
        assert expected.grad.norm() > 1e-3
        assert _error(got.grad, expected.grad) <= BOUND


def test_gradcheck() -> None:
    queries, documents, temperature = _inputs(5, 3, torch.float64)

    def loss(queries: Tensor, documents: Tensor, temperature: Tensor) -> Tensor:
        return zp.losses.info_nce(queries, documents, temperature, symmetric=True, label_offset=2, tile_rows=2)

    assert torch.autograd.gradcheck(loss, (queries, documents, 10 * temperature))
    frozen = documents.detach()
    assert torch.autograd.gradcheck(lambda each: loss(each, frozen, torch.tensor(0.5)), (queries,))
    assert torch.autograd.gradcheck(
        lambda each: loss(queries.detach(), frozen, each), (10 * temperature.detach()).requires_grad_()
    )


def test_second_derivatives() -> None:
    ours, plain = _inputs(dtype=torch.float64), _inputs(dtype=torch.float64)
    for inputs, loss_fn in ((ours, zp.losses.info_nce), (plain, _plain)):
        grads = torch.autograd.grad(loss_fn(*inputs), inputs, create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()
    for got, want in zip(ours, plain, strict=True):
        assert want.grad.norm() > 1e-3 and _error(got.grad, want.grad) <= 1e-12


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def _largest(loss_fn: Any, *inputs: Tensor, **options: Any) -> int:
    with _Largest() as mode:
        loss_fn(*inputs, **options).backward()
    return mode.elements


def test_the_largest_tensor_is_a_tile() -> None:
    rows, extra = 512, 256
    documents = rows + extra
    assert _largest(_plain, *_inputs(rows, extra)) == rows * documents
    for tile_rows in (32, 64):
        options = {"symmetric": True, "tile_rows": tile_rows}
        assert _largest(zp.losses.info_nce, *_inputs(rows, extra), **options) == tile_rows * documents


def test_low_precision_computes_in_fp32() -> None:
    low, high = _inputs(dtype=torch.bfloat16), [each.detach().bfloat16().float().requires_grad_() for each in _inputs()]
    with torch.autocast("cpu", torch.bfloat16):
        loss = zp.losses.info_nce(*low)
        loss.backward()
    want = _plain(*high)
    want.backward()
    assert loss.dtype == torch.float32 and abs((loss - want).item()) <= 1e-6 * want.item()
    for got, expected in zip(low, high, strict=True):
        assert got.grad.dtype == torch.bfloat16
        assert _error(got.grad.float(), expected.grad) <= 2**-8  # half a unit in the last place


# -- ranks -----------------------------------------------------------------------------------------------------------


def _shares(rank: int, counts: tuple[int, int], extra: int, inputs: list[Tensor]) -> list[Tensor]:
    """A rank's rows: its pairs, and ``extra`` hard negatives of its own."""
    queries, documents, temperature = inputs
    at = counts[0] * rank
    negatives = documents[ROWS + extra * rank : ROWS + extra * (rank + 1)]
    own = [queries[at : at + counts[rank]], torch.cat([documents[at : at + counts[rank]], negatives]), temperature]
    return [each.detach().clone().requires_grad_() for each in own]


def _across(counts: tuple[int, int], symmetric: bool, by_hand: bool) -> list[float]:
    """Errors against one process: of the loss, and of the gradients."""
    rank, extra = dist.get_rank(), 0 if by_hand else 4
    whole = _inputs(dtype=torch.float64)
    own = [_shares(each, counts, extra, whole) for each in range(2)][rank]
    if by_hand:
        # As with gather_rows: a loss of one's own, of the same number of rows on all ranks.
        loss = _plain(own[0], zp.losses.gather_rows(own[1]), own[2], offset=rank * counts[0])
    else:
        loss = zp.losses.info_nce(*own, symmetric=symmetric, cross_rank=True, tile_rows=7)
    loss.backward()
    # What a strategy does: an average of the gradients. The embeddings' belong to one rank.
    mean, temperature = loss.detach() / 2, own[2].grad / 2
    dist.all_reduce(mean)
    dist.all_reduce(temperature)
    shares = [_shares(each, counts, extra, whole) for each in range(2)]
    queries = torch.cat([each[0] for each in shares]).detach().requires_grad_()
    positives = torch.cat([each[1][: len(each[0])] for each in shares])
    documents = torch.cat([positives, *(each[1][len(each[0]) :] for each in shares)]).detach().requires_grad_()
    degree = whole[2].detach().requires_grad_()
    want = _plain(queries, documents, degree, symmetric)
    want.backward()
    pairs, negatives = slice(rank * counts[0], rank * counts[0] + counts[rank]), slice(ROWS + extra * rank, None)
    wanted = torch.cat([documents.grad[pairs], documents.grad[negatives][:extra]])
    return [
        abs((mean - want).item()),
        _error(own[0].grad / 2, queries.grad[pairs]),
        _error(own[1].grad / 2, wanted),
        _error(temperature, degree.grad),
    ]


@pytest.mark.parametrize(
    ("counts", "symmetric", "by_hand"),
    [((24, 24), False, False), ((30, 18), True, False), ((24, 24), False, True)],
    ids=["even", "uneven-symmetric", "gather_rows"],
)
def test_ranks_have_the_gradients_of_one_process(ranks2: Any, counts: Any, symmetric: bool, by_hand: bool) -> None:
    for errors in ranks2.run(_across, counts, symmetric, by_hand):
        assert max(errors) <= BOUND, errors


def _memory_of_ranks(rows: int) -> int:
    rank, own = dist.get_rank(), rows // dist.get_world_size()
    queries, documents, temperature = _inputs(rows, 0)
    share = slice(rank * own, (rank + 1) * own)
    mine = [queries[share].detach().requires_grad_(), documents[share].detach().requires_grad_(), temperature]
    # In one tile: what is less is this rank's share of the rows.
    return _largest(zp.losses.info_nce, *mine, cross_rank=True, tile_rows=rows)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.thorough)])
def test_each_rank_has_its_rows_of_the_matrix(ranks: Any, world_size: int) -> None:
    rows = 256
    assert ranks(world_size).run(_memory_of_ranks, rows) == [rows * rows // world_size] * world_size


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"queries": torch.zeros(3)}, "`queries` must be embeddings"),
        ({"documents": torch.zeros(9, 4, dtype=torch.long)}, "`documents` must be embeddings"),
        ({"documents": torch.zeros(9, 5)}, "the same dimensions"),
        ({"queries": torch.zeros(0, 4)}, "the same dimensions"),
        ({"documents": torch.zeros(7, 4)}, "`label_offset` must leave"),
        ({"label_offset": 2}, "`label_offset` must leave"),
        ({"label_offset": -1}, "`label_offset` must leave"),
        ({"temperature": 0.0}, "`temperature` must be a positive"),
        ({"temperature": torch.ones(2)}, "`temperature` must have one"),
        ({"tile_rows": 0}, "`tile_rows`"),
        ({"symmetric": 1}, "`symmetric`"),
        ({"cross_rank": None}, "`cross_rank`"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], says: str) -> None:
    arguments: dict[str, Any] = {"queries": torch.zeros(8, 4), "documents": torch.zeros(9, 4), **change}
    with pytest.raises(ValueError, match=says):
        zp.losses.info_nce(**arguments)


def test_embeddings_are_not_gathered_twice() -> None:
    queries, documents, temperature = _inputs()
    with with_all_embeddings():
        assert float(zp.losses.info_nce(queries, documents, temperature)) > 0
        with pytest.raises(ValueError, match="leave one of them out"):
            zp.losses.info_nce(queries, documents, temperature, cross_rank=True)
        with pytest.raises(ValueError, match="leave one of them out"):
            zp.losses.gather_rows(documents)
    assert torch.equal(zp.losses.gather_rows(documents), documents)
