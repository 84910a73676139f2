"""After a fit the module is an ordinary one; copies made in it are whole; checkpoints are what hooks make of them."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction

from lightning_zeroplus.strategy.fsdp2 import sharding
from tests.fsdp.programs import WAYS, Automatic, difference, message
from tests.fsdp.training import DIM, Block, CountedGather, ShardsItself, Task, fit, loader, ours, plain, trainer

BOUND = 1e-6


def _afterwards(strategy: Any, then: str) -> tuple[Tensor, list[str], list[str]]:
    task = Automatic()
    names = [name for name, _ in task.named_modules()]
    weight = task.net.first.weight
    weight.register_hook(lambda grad: grad * 0.5)
    trainer(strategy, max_steps=4).fit(task, loader())
    assert task.net.first.weight is weight and type(task.net.first.weight) is nn.Parameter
    assert "apply" not in vars(_SingleLevelFunction)
    if then == "loop":
        task.zero_grad()
        optimizer = torch.optim.SGD(task.parameters(), 0.1)
        for batch in loader(64):
            optimizer.zero_grad()
            task.loss(batch).backward()
            optimizer.step()
    else:
        trainer(ours(wrap=Block) if then == "fsdp" else "ddp", max_steps=3).fit(task, loader())
    flat = torch.cat([param.detach().flatten() for param in copy.deepcopy(task).parameters()])
    return flat, names, [name for name, _ in task.named_modules()]


def _compare_afterwards(then: str, kwargs: dict[str, Any]) -> float:
    want, _, _ = _afterwards("ddp", then)
    got, before, after = _afterwards(ours(**kwargs), then)
    assert before == after
    return float((got - want).abs().max())


@pytest.mark.sampled
@pytest.mark.parametrize("kwargs", [{}, {"reduction": "step", "activation_checkpointing": Block}])
@pytest.mark.parametrize("then", ["loop", "ddp", "fsdp"])
def test_the_same_module_trains_on_as_after_ddp(ranks2: Any, then: str, kwargs: dict[str, Any]) -> None:
    assert max(ranks2.run(_compare_afterwards, then, kwargs)) <= BOUND


class Copies(Automatic):
    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.before = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            wanted = self.before(batch[0])
        loss = self.loss(batch) + F.mse_loss(self.net(batch[0]), wanted)
        if batch_idx == 3:
            self.before.load_state_dict(copy.deepcopy(self.net).state_dict())
        return loss


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_network_is_whole(ranks2: Any, way: str) -> None:
    for error, _ in ranks2.run(difference, Copies, way):
        assert error <= BOUND


class Half(Automatic):
    """Saves a part of the weights, under other names and with other values."""

    path: Path | None = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {f"part.{name}": value * 2 for name, value in weights.items() if "first" not in name}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.removeprefix("part."): value / 4 for name, value in weights.items()}

    def on_train_batch_end(self, out: Any, batch: Any, batch_idx: int) -> None:
        if self.path is not None and batch_idx == 3:
            self.trainer.save_checkpoint(self.path)


def _resume(strategy: Any, again: Any) -> Tensor:
    path = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(path, 0)
    first, second = Half(), Half()
    first.path = Path(path[0], "x.ckpt")
    trainer(strategy, max_steps=5).fit(first, loader())
    second.strict_loading = False
    trainer(again, max_steps=7).fit(second, loader(), ckpt_path=first.path)
    return torch.cat([param.detach().flatten() for param in second.parameters()])


def _compare_resumed(distributed: bool) -> float:
    want = _resume("ddp", "ddp")
    kwargs = {"save_distributed_checkpoint": distributed}
    return float((_resume(ours(**kwargs), ours(**kwargs)) - want).abs().max())


@pytest.mark.parametrize("distributed", [True, False])
def test_what_checkpoint_hooks_do_is_saved_and_loaded(ranks2: Any, distributed: bool) -> None:
    assert max(ranks2.run(_compare_resumed, distributed)) <= BOUND


class _Unit(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = module, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class _ComplexInBf16(Automatic):
    trainer_kwargs = {"precision": "bf16-mixed"}

    def __init__(self) -> None:
        super().__init__()
        self.front = _Unit(nn.Linear(DIM, DIM, dtype=torch.complex64))


class _Widens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


class _TwoDtypes(Automatic):
    def __init__(self) -> None:
        super().__init__()
        self.net.first.bias = nn.Parameter(self.net.first.bias.detach().double())


class _DoubleOnly(Automatic):
    def __init__(self) -> None:
        super().__init__()
        self.net.double()

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0].double()), batch[1])


class _Double(Automatic):
    """A network in float64 behind a layer in float32, which has one in float64 beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.front = _Unit(nn.Sequential(nn.Linear(DIM, DIM), _Widens(), nn.Linear(DIM, DIM).double()))
        self.net.double()

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(self.front(batch[0])), batch[1])


@pytest.mark.parametrize(
    ("program", "said"),
    [(_ComplexInBf16, "without its imaginary part"), (_TwoDtypes, "are of torch.float32 and torch.float64")],
)
def test_dtypes_that_fsdp2_cannot_keep_or_reduce_together_are_refused(ranks2: Any, program: type, said: str) -> None:
    for text in ranks2.run(message, program):
        assert text.startswith("MisconfigurationException: The parameter") and said in text


def test_float64_is_reduced_in_float64(ranks2: Any) -> None:
    for error, _ in ranks2.run(difference, _DoubleOnly, "roots"):
        assert error <= 1e-14
    for error, _ in ranks2.run(difference, _Double, "roots"):
        assert error <= BOUND


class _Normalized(Automatic):
    trainer_kwargs = {"precision": "bf16-mixed"}

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(self.front(batch[0])).float(), batch[1])


def test_statistics_stay_in_fp32_under_mixed_precision(ranks2: Any) -> None:
    for error, _ in ranks2.run(difference, _Normalized, "roots"):
        assert error <= 2**-7  # one rounding to bf16, of weights near one


class _PlainTask(ShardsItself, Task):
    pass


def _gathers() -> list[int]:
    counts = []
    for make, strategy in ((_PlainTask, plain()), (Task, ours())):
        task, counted = make(), CountedGather()
        task.on_train_start = lambda task=task, counted=counted: counted.watch(task)
        with patch.object(sharding, "_SPARE_SHARE", 2**40):  # no room for weights that stay whole
            fit(strategy, task)
        counts.append(counted.calls)
    return counts


def test_a_loop_that_touches_nothing_gathers_as_often_as_fsdp2_itself(ranks2: Any) -> None:
    for theirs, mine in ranks2.run(_gathers):
        assert mine == theirs > 0
