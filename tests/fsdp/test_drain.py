"""Deferred weight gradients under FSDP2: exactly those that FSDP2 computes by itself, wherever they are flushed."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from lightning_zeroplus.fsdp.drain import Drain
from lightning_zeroplus.fsdp.units import Units, end_backward
from lightning_zeroplus.weight_grads.store import WeightGradStore
from tests.fsdp.mixture import DIM, MixtureNet, batch, build, deferring, grads, loss, plain, same, set_sync

FLUSHES = ("end", "each", "first", "last")


@contextmanager
def _deferring(store: WeightGradStore, flush: str, index: int, micro_batches: int) -> Iterator[None]:
    """One micro-batch; ``first`` and ``last``: only that one defers; ``each``: flushed after it."""
    if (flush == "first" and index > 0) or (flush == "last" and index < micro_batches - 1):
        yield
    else:
        with store.defer():
            yield
    if flush == "each":
        store.flush()


def _drained(micro_batches: int, flush: str, finish: str, **kwargs: Any) -> tuple[bool, int]:
    net = build()
    store = deferring(net, WeightGradStore(**kwargs))
    units = Units(net)
    Drain(units, store)
    most = 0
    for index in range(micro_batches):
        units.set_sync(finish == "in the last backward" and index == micro_batches - 1)
        with _deferring(store, flush, index, micro_batches):
            loss(net, index).backward()
        most = max(most, store.nbytes)
    if finish == "afterwards":
        store.flush()
        units.reduce()
    store.check_empty()
    assert units.held_bytes() == 0
    return same(grads(net), plain(micro_batches)), most


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("finish", ["in the last backward", "afterwards"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_equal_fsdp2_exactly(ranks2: Any, micro_batches: int, finish: str) -> None:
    for flush in FLUSHES:
        for equal, most in ranks2.run(_drained, micro_batches, flush, finish):
            assert equal, flush
            assert most > 0 or finish == "in the last backward" or flush == "each"


def test_a_bounded_store_is_bounded_and_exact(ranks2: Any) -> None:
    limit = 4096
    unbounded = ranks2.run(_drained, 3, "end", "in the last backward")
    for (equal, most), (_, most_unbounded) in zip(ranks2.run(_bounded, limit), unbounded, strict=True):
        assert equal
        assert 0 < most <= limit < most_unbounded


def _bounded(limit: int) -> tuple[bool, int]:
    return _drained(3, "end", "in the last backward", max_bytes=limit)


# -- what FSDP2 does without the drain -------------------------------------------------------------------------------


def _stock(micro_batches: int) -> None:
    """The pipeline's way: no backward reduces, the store is flushed, FSDP2's own post-backward reduces."""
    net = build()
    store = deferring(net)
    for index in range(micro_batches):
        set_sync(net, False)
        with store.defer():
            loss(net, index).backward()
    store.flush()
    set_sync(net, True)
    end_backward(net)


def _stock_message(micro_batches: int) -> str:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # FSDP2 prints the stack, too
        try:
            _stock(micro_batches)
        except AssertionError as error:
            return str(error)
    return "no assertion"


@pytest.mark.skipif(
    hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes"), reason="this torch sums unreduced gradients in one dtype"
)
def test_stock_fsdp2_fails_on_a_unit_that_mixes_deferred_and_ordinary(ranks2: Any) -> None:
    for micro_batches in (1, 3):
        for message in ranks2.run(_stock_message, micro_batches):
            assert "uniform gradient dtype" in message


def _late_flush() -> tuple[int, bool, bool]:
    net = build()
    store = deferring(net)
    missing = 0
    for index in range(2):
        with store.defer():
            loss(net, index).backward()
        store.flush()  # too late: the units are reduced
        missing = missing or 9 - len(grads(net))
        got = grads(net).get("blocks.0.up.weight")
        net.zero_grad()
    first, second = (_plain_at(index)["blocks.0.up.weight"] for index in range(2))
    return missing, torch.equal(got, first), torch.equal(got, second)


def _plain_at(index: int) -> dict[str, torch.Tensor]:
    net = build()
    loss(net, index).backward()
    return grads(net)


def test_stock_fsdp2_takes_the_gradient_of_the_step_before_if_the_store_is_flushed_late(ranks2: Any) -> None:
    for missing, is_first, is_second in ranks2.run(_late_flush):
        assert missing and is_first and not is_second


# -- precision ------------------------------------------------------------------------------------------------------


def _accumulation_error(micro_batches: int) -> float:
    """Against the sum in fp64 of what each rank computes in bf16 for each micro-batch."""
    net = build()
    store = deferring(net)
    units = Units(net)
    Drain(units, store)
    for index in range(micro_batches):
        units.set_sync(index == micro_batches - 1)
        with store.defer():
            loss(net, index).backward()
    torch.manual_seed(0)
    reference: nn.Module = MixtureNet().bfloat16()
    world_size = torch.distributed.get_world_size()
    sums = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in reference.named_parameters()}
    for rank in range(world_size):
        for index in range(micro_batches):
            x, y = batch(rank, index)
            torch.nn.functional.mse_loss(reference(x.bfloat16()).float(), y).backward()
            for name, p in reference.named_parameters():
                sums[name] += p.grad.double() / world_size
                p.grad = None
    got = grads(net)
    return max(float((got[name].double() - want).norm() / want.norm()) for name, want in sums.items())


def test_64_micro_batches_are_summed_in_fp32(ranks2: Any) -> None:
    assert max(ranks2.run(_accumulation_error, 64)) <= 1e-6


# -- unusual units --------------------------------------------------------------------------------------------------


class _Tied(nn.Module):
    """The output layer shares its weight with the embedding: one deferred and one ordinary gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIM, DIM)
        self.net = MixtureNet()
        self.net.first.weight.requires_grad_(False)
        self.net.first.bias = None
        self.net.last.weight = self.embedding.weight
        self.net.last.__class__ = type(self.net.first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.embedding((x * 3).int().abs() % DIM).sum(1))


def _tied(sync: bool) -> bool:
    # In fp32: autograd adds the two gradients of a tied weight in the graph's dtype, the store in the reduce dtype.
    net = build(make=_Tied, param_dtype=None)
    store = deferring(net)
    units = Units(net)
    Drain(units, store)
    units.set_sync(sync)
    with store.defer():
        loss(net, 0).backward()
    assert len(store) == (0 if sync else 7)
    store.flush()
    units.reduce()
    return same(grads(net), plain(1, make=_Tied, param_dtype=None))


def test_tied_and_frozen_weights(ranks2: Any) -> None:
    assert ranks2.run(_tied, True) == ranks2.run(_tied, False) == [True, True]
