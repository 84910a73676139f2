"""In a window, most micro-batches begin without a collective of all ranks; signals and hooks reach the others later."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_zeroplus as zp
from lightning_zeroplus.strategy.common import meeting
from tests.checkpoint import model

KINDS = (0, 1, 2, 3, "fsdp")
WINDOW, BATCHES = 16, 36
# The first micro-batch of each window, and the one before a pause.
TOGETHER = [0, 1, 16, 32]


class _Endless(IterableDataset[Tensor]):
    """Nobody knows its length."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from _data()[:BATCHES]


def _data() -> Tensor:
    return torch.randint(-2, 3, (2 * BATCHES, 2, 6), generator=torch.Generator().manual_seed(2)).float()


class _Module(pl.LightningModule):
    """On rank 1 something happens at some batches."""

    def __init__(
        self, signal_at: int = -1, hook_at: int = -1, read_at: int = -1, writes_at: Sequence[int] = ()
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        for param in self.net.parameters():
            nn.init.constant_(param, 1.0)  # so that all sums are exact
        self.at = {signal_at: self._receive, hook_at: self._set_hook, read_at: self._read}
        self.writes_at = writes_at
        self.began: list[int] = []
        self.calls = Counter[str]()
        self.total = 0.0

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx in self.at and self.global_rank == 1:
            self.at[batch_idx]()
        if batch_idx in self.writes_at:
            self.net[0].weight.data[-1] += 1.0  # the part of one of the ranks
            self.net[1].weight.data.neg_()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls["steps"] += 1
        return self.net(batch + self.global_rank).sum()

    def _receive(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def _set_hook(self) -> None:
        self.net[0].weight.register_post_accumulate_grad_hook(lambda _: self.calls.update(hook=1))

    def _read(self) -> None:
        self.total += float(self.net[1].weight.sum())

    def on_train_end(self) -> None:
        with zp.gathered(self.parameters()):
            self.weights = [param.detach().clone() for param in self.parameters()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 2**-6)


class _Counted(meeting._Pause):
    """Notes the batches before which the ranks come together."""

    def begin(self) -> None:
        self._trainer.lightning_module.began.append(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        super().begin()


def _strategy(kind: Any) -> Any:
    return zp.ZeroPlusFSDPStrategy() if kind == "fsdp" else zp.ZeroPlusStrategy(kind)


def _fit(strategy: Any, delay: float, data: Any = None, **arguments: Any) -> Any:
    module = _Module(**arguments)
    trainer = model.trainer(strategy, accumulate_grad_batches=WINDOW, max_epochs=1)
    with patch.object(meeting, "_DELAY", delay), patch.object(meeting, "_Pause", _Counted):
        try:
            trainer.fit(module, DataLoader(_data() if data is None else data, batch_size=None))
        except SIGTERMException:
            module.calls["ended"] = 1
    return module


def _same(first: Any, second: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first.weights, second.weights, strict=True))


def _regular() -> dict[Any, Any]:
    found = {}
    for kind in KINDS:
        paused, never = _fit(_strategy(kind), 1e9), _fit(_strategy(kind), 0.0)
        slow = _fit(_strategy(kind), 1e-9)
        found[kind] = paused.began, never.began, slow.began, _same(paused, never)
    return found


def test_micro_batches_that_need_no_other_rank_begin_without_one(ranks2: Any) -> None:
    for found in ranks2.run(_regular):
        for kind, (paused, never, slow, same) in found.items():
            first = [0, 1, 2] if kind == 3 else [0, 1]  # whole after the first forward
            assert paused == first + TOGETHER[2:], kind
            assert never == slow == list(range(BATCHES)), kind
            assert same, kind


def _gathering_or_reducing() -> list[Any]:
    return [
        model.strategy(3),
        zp.ZeroPlusStrategy(2, reduction="backward"),
        zp.ZeroPlusFSDPStrategy(reduction="backward"),
    ]


def _gathering() -> list[list[int]]:
    return [_fit(strategy, 1e9).began for strategy in _gathering_or_reducing()]


def test_micro_batches_that_gather_or_reduce_begin_together(ranks2: Any) -> None:
    for found in ranks2.run(_gathering):
        assert found == [list(range(BATCHES))] * 3


def _terminated() -> dict[Any, Any]:
    found = {}
    for kind in KINDS:
        module = _fit(_strategy(kind), 1e9, signal_at=20)
        found[kind] = module.calls["ended"], module.calls["steps"]
    return found


def test_sigterm_in_a_pause_ends_all_ranks_before_the_same_batch(ranks2: Any) -> None:
    for found in ranks2.run(_terminated):
        assert found == dict.fromkeys(KINDS, (1, 32))


def _hooked() -> dict[Any, Any]:
    found = {}
    for kind in KINDS:
        for data, at in ((None, WINDOW + 4), (_Endless(), BATCHES - 2)):
            paused, never = (_fit(_strategy(kind), delay, data, hook_at=at) for delay in (1e9, 0.0))
            found[kind, at] = at in paused.began, paused.calls, never.calls, _same(paused, never)
    return found


def test_a_hook_that_one_rank_sets_in_a_pause(ranks2: Any) -> None:
    """The last micro-batch of a window, or of an epoch, reduces before the other rank knows of the hook."""
    for rank, found in enumerate(ranks2.run(_hooked)):
        for (kind, at), (is_together, paused, never, same) in found.items():
            assert not is_together, kind
            assert paused == never and paused["hook"] == (BATCHES - at) * rank, kind
            assert same, kind


def _hooked_in_time() -> list[tuple[int, bool]]:
    found = []
    for first, second in zip(_gathering_or_reducing(), _gathering_or_reducing(), strict=True):
        hooked, plain = _fit(first, 1e9, hook_at=20), _fit(second, 1e9)
        found.append((hooked.calls["hook"], _same(hooked, plain)))
    return found


def test_a_hook_that_one_rank_sets_while_micro_batches_reduce(ranks2: Any) -> None:
    """It is none for the ranks' collectives until all know it: one rank would accumulate where the other reduces."""
    for rank, found in enumerate(ranks2.run(_hooked_in_time)):
        assert found == [((BATCHES - 20) * rank, True)] * 3


def _touched() -> dict[Any, Any]:
    found = {}
    for kind in KINDS:
        arguments = {"read_at": 20, "writes_at": (19, 22, 25)}
        paused, never = (_fit(_strategy(kind), delay, **arguments) for delay in (1e9, 0.0))
        found[kind] = len(paused.began), paused.total == never.total, _same(paused, never)
    return found


def test_weights_read_by_one_rank_and_written_by_all_in_a_pause(ranks2: Any) -> None:
    for found in ranks2.run(_touched):
        for kind, (together, *same) in found.items():
            assert together < BATCHES // 2 and all(same), kind
