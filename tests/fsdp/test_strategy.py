"""ZeroPlusFSDPStrategy trains as FSDP2 by hand under Lightning's own strategy, and as DDP."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import lightning_zeroplus as zp
from lightning_zeroplus.strategy.fsdp2 import sharding
from lightning_zeroplus.strategy.fsdp2.trainer import ZeroPlusFSDPStrategy
from lightning_zeroplus.weight_grads.convert import defer_weight_grads
from tests.fsdp.training import (
    AnnouncedWindowTask,
    Block,
    ManualTask,
    PlainManualTask,
    ShardsItself,
    Task,
    WindowTask,
    fit,
    loader,
    ours,
    plain,
    relative_error,
    trainer,
    weights,
)

STEPS = 10
UNITS = 3
#: fp32 sums in another order.
BOUND = 1e-6


class _PlainTask(ShardsItself, Task):
    pass


def _automatic() -> bool:
    want, task = fit(plain(), _PlainTask()), fit(ours(), Task())
    assert task.units == UNITS and task.counted.calls == want.counted.calls == UNITS * STEPS
    assert task.losses == want.losses and task.losses[-1] < task.losses[0]
    return torch.equal(weights(task), weights(want))


def test_automatic_optimization_equals_lightnings_strategy_to_the_bit(ranks2: Any) -> None:
    assert ranks2.run(_automatic) == [True, True]


class _Defers(ManualTask):
    """Mixin: every linear layer of the blocks defers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        assert len(defer_weight_grads(self, ("net.blocks.*", "net.first"))) == 5


class DeferringManualTask(_Defers, ManualTask):
    pass


class DeferringWindowTask(_Defers, WindowTask):
    pass


class DeferringAnnouncedWindowTask(_Defers, AnnouncedWindowTask):
    pass


class FlushingWindowTask(_Defers, WindowTask):
    """A schedule of the user's: weight gradients between micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        store = self.trainer.strategy.weight_grads
        with self.trainer.strategy.coalesce():
            for chunk in self.chunks(batch):
                self.manual_backward(self.loss(chunk) / self.backwards)
                assert len(store) == 5 and store.flush() == 5
        self.optimizers().step()
        self.optimizers().zero_grad()


def _manual(task_class: type[ManualTask], reduction: str) -> tuple[bool, int]:
    want, task = fit(plain(), PlainManualTask()), fit(ours(reduction=reduction), task_class())
    assert task.units == UNITS
    return torch.equal(weights(task), weights(want)), task.counted.calls


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("task_class", "reduction"),
    [
        (WindowTask, "auto"),
        (AnnouncedWindowTask, "auto"),
        (ManualTask, "step"),
        (WindowTask, "step"),
        (DeferringManualTask, "step"),
        (DeferringWindowTask, "auto"),
        (DeferringAnnouncedWindowTask, "auto"),
        (FlushingWindowTask, "auto"),
    ],
)
def test_four_backwards_reduce_each_unit_once_and_equal_fsdp2_to_the_bit(
    ranks2: Any, task_class: type[ManualTask], reduction: str
) -> None:
    assert ranks2.run(_manual, task_class, reduction) == [(True, UNITS * STEPS)] * 2


# -- against DDP ------------------------------------------------------------------------------------------------------


class _Clips(ManualTask):
    clip: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for chunk in self.chunks(batch):
            self.manual_backward(self.loss(chunk))
        self.clip_gradients(self.optimizers(), **self.clip)
        self.optimizers().step()
        self.optimizers().zero_grad()


class ClipsNorm(_Clips):
    clip = {"gradient_clip_val": 0.3, "gradient_clip_algorithm": "norm"}


class ClipsValue(_Clips):
    clip = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}


class StepsWithClosure(ManualTask):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            for chunk in self.chunks(batch):
                loss = self.loss(chunk)
                self.manual_backward(loss)
            return loss

        optimizer.step(closure)


class DropsHalf(ManualTask):
    """``zero_grad()`` drops what is not reduced yet, too."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for index, chunk in enumerate(self.chunks(batch)):
            self.manual_backward(self.loss(chunk))
            if index == 1:
                self.zeroes().zero_grad()
        self.optimizers().step()
        self.zeroes().zero_grad()

    def zeroes(self) -> Any:
        return self.optimizers()


class DropsHalfByModule(DropsHalf):
    """The module's ``zero_grad()``, too."""

    def zeroes(self) -> Any:
        return self


class DirectBackward(ManualTask):
    """Without ``manual_backward()``; Lightning's DDP does not reduce then, so the reference calls it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for chunk in self.chunks(batch):
            (self.loss(chunk) / self.backwards).backward()
        self.optimizers().step()
        self.optimizers().zero_grad()


@functools.cache
def _with_ddp(task_class: type[Task], kwargs: tuple[tuple[str, Any], ...]) -> Tensor:
    """The weights, the same for every way to shard."""
    return weights(fit("ddp", task_class(optimizer="adamw"), **dict(kwargs)))


def _against_ddp(
    task_class: type[Task], strategy: dict[str, Any], kwargs: dict[str, Any], defer: bool
) -> tuple[float, int]:
    want = _with_ddp(ManualTask if task_class is DirectBackward else task_class, tuple(kwargs.items()))
    task = task_class(optimizer="adamw")
    if defer:
        defer_weight_grads(task)
    fit(ours(**strategy), task, **kwargs)
    return relative_error(weights(task), want), task.counted.calls


_ACCUMULATE: dict[str, Any] = {"accumulate_grad_batches": 3, "max_steps": 4}
AUTOMATIC: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "plain": ({}, {}, 10),
    "clip-norm": ({}, {"gradient_clip_val": 0.3}, 10),
    "clip-value": ({}, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}, 10),
    "accumulate": ({}, _ACCUMULATE, 4),
    "accumulate-backward": ({"reduction": "backward"}, _ACCUMULATE, 10),  # the epoch has 10 batches
    "accumulate-step": ({"reduction": "step"}, _ACCUMULATE, 4),
    "accumulate-offload": ({"offload": "cpu"}, _ACCUMULATE, 10),
    "checkpointing": ({"activation_checkpointing": Block}, {}, 10),
    "offload": ({"offload": "cpu"}, {"gradient_clip_val": 0.3}, 10),
}


@pytest.mark.sampled
@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("case", AUTOMATIC)
def test_automatic_optimization_trains_as_ddp(ranks2: Any, case: str, defer: bool) -> None:
    strategy, kwargs, reductions = AUTOMATIC[case]
    for error, calls in ranks2.run(_against_ddp, Task, strategy, kwargs, defer):
        assert error <= BOUND and calls == UNITS * reductions


def _reductions(most: int, precision: Any, strategy: dict[str, Any]) -> int:
    task = Task(optimizer="adamw")
    with patch.object(sharding, "_WAITING_ELEMENTS", most):
        fit(ours(**strategy), task, precision=precision, **_ACCUMULATE)
    return task.counted.calls


@pytest.mark.parametrize(
    ("most", "precision", "strategy", "reductions"),
    [
        (10**6, "bf16-true", {}, 4),
        (10, "32-true", {}, 10),
        (10**6, "bf16-mixed", {}, 4),
        (10**6, "bf16-mixed", {"reduce_dtype": None}, 10),  # the units would sum in bf16
    ],
)
def test_few_micro_batches_wait_for_the_last(
    ranks2: Any, most: int, precision: str, strategy: dict[str, Any], reductions: int
) -> None:
    assert ranks2.run(_reductions, most, precision, strategy) == [UNITS * reductions] * 2


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("reduction", ["backward", pytest.param("step", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "task_class",
    [ManualTask, ClipsNorm, ClipsValue, StepsWithClosure, DropsHalf, DropsHalfByModule, DirectBackward],
)
def test_manual_optimization_trains_as_ddp(ranks2: Any, task_class: type[Task], reduction: str) -> None:
    for defer in (False, True):
        for error, calls in ranks2.run(_against_ddp, task_class, {"reduction": reduction}, {}, defer):
            assert error <= BOUND and calls == UNITS * STEPS * (1 if reduction == "step" else 4)


# -- precision --------------------------------------------------------------------------------------------------------


class _PlainMixed(PlainManualTask):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def _mixed() -> tuple[bool, set[torch.dtype], torch.dtype]:
    want = fit(plain(), _PlainMixed(), precision="bf16-mixed")
    task = fit(ours(), DeferringWindowTask(), precision="bf16-mixed")
    return torch.equal(weights(task), weights(want)), task.counted.dtypes, next(task.parameters()).dtype


def test_mixed_precision_equals_fsdp2_to_the_bit_and_reduces_in_fp32(ranks2: Any) -> None:
    assert ranks2.run(_mixed) == [(True, {torch.float32}, torch.float32)] * 2


def _true(reduce_dtype: torch.dtype | None) -> tuple[set[torch.dtype], torch.dtype, bool]:
    task = fit(ours(reduce_dtype=reduce_dtype), DeferringWindowTask(), precision="bf16-true")
    return task.counted.dtypes, next(task.parameters()).dtype, bool(weights(task).isfinite().all())


def test_true_bf16(ranks2: Any) -> None:
    assert ranks2.run(_true, torch.float32) == [({torch.float32}, torch.bfloat16, True)] * 2
    assert ranks2.run(_true, None) == [({torch.bfloat16}, torch.bfloat16, True)] * 2


# -- what becomes a unit ----------------------------------------------------------------------------------------------


class _Parts(Task):
    """Children of a LightningModule as they come: lists, containers, modules without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])
        self.activation = nn.Tanh()
        self.found: list[str] = []

    def on_fit_start(self) -> None:
        assert not isinstance(self, FSDPModule) and "configure_model" not in vars(self)
        assert all(isinstance(param, DTensor) for param in self.parameters())
        self.found = [name for name, module in self.named_modules() if isinstance(module, FSDPModule)]


def _units(wrap: Any) -> list[str]:
    task = _Parts()
    strategy = ZeroPlusFSDPStrategy(wrap=wrap)
    fit(strategy, task, max_steps=1, limit_val_batches=0)
    return task.found


def test_wrapping_by_classes_size_and_function(ranks2: Any) -> None:
    roots = ["net", "heads.0", "heads.1"]
    blocks = ["net.blocks.0", "net.blocks.1"]
    for wrap, inner in (
        (None, []),
        (Block, blocks),
        ((Block, nn.Embedding), blocks),
        (1000, blocks),
        (10**6, []),
        (_is_up, ["net.blocks.0.up", "net.blocks.1.up"]),
    ):
        assert all(sorted(names) == sorted(roots + inner) for names in ranks2.run(_units, wrap)), wrap


def _is_up(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == 32


class _HasNoValuesOfItsOwn(Task):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, device="meta"))


def _message(task_class: type[Task], strategy: dict[str, Any], kwargs: dict[str, Any]) -> str:
    task = task_class()
    try:
        fit(ZeroPlusFSDPStrategy(**strategy), task, **kwargs)
    except MisconfigurationException as error:
        assert not any(isinstance(module, FSDPModule) for module in task.modules())
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("task_class", "strategy", "kwargs", "message"),
    [
        (_HasNoValuesOfItsOwn, {}, {}, "'scale' is on the meta device"),
        (Task, {"shard_size": 3}, {}, "`shard_size=3` x `replicate_size=1`"),
        (Task, {"replicate_size": 4}, {}, "must be the number of devices, 2"),
        (Task, {"tensor_parallel_size": 2}, {}, "no parameter is a DTensor"),
        (Task, {}, {"precision": "16-mixed"}, "does not support"),
    ],
)
def test_refusals(
    ranks2: Any, task_class: type[Task], strategy: dict[str, Any], kwargs: dict[str, Any], message: str
) -> None:
    if kwargs:
        with pytest.raises(Exception, match="does not support"):
            trainer_in_one_process(strategy, kwargs)
        return
    for said in ranks2.run(_message, task_class, strategy, kwargs):
        assert message in said


def trainer_in_one_process(strategy: dict[str, Any], kwargs: dict[str, Any]) -> None:
    pl.Trainer(strategy=ZeroPlusFSDPStrategy(**strategy), accelerator="cpu", devices=2, **kwargs)


@pytest.mark.parametrize(
    "arguments",
    [
        {"wrap": 0},
        {"wrap": ()},
        {"wrap": "Block"},
        {"activation_checkpointing": [int]},
        {"activation_checkpointing": 1000},
        {"reduction": "never"},
        {"reduce_dtype": torch.int32},
        {"reduce_dtype": "float32"},
        {"offload": "nvme"},
        {"shard_size": 0},
        {"replicate_size": "auto"},
        {"tensor_parallel_size": True},
    ],
)
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(MisconfigurationException, match=next(iter(arguments))):
        ZeroPlusFSDPStrategy(**arguments)


def test_the_name_is_registered_and_builds_the_strategy() -> None:
    strategy = pl.Trainer(strategy="zeroplus_fsdp", accelerator="cpu", devices=2, logger=False).strategy
    assert type(strategy) is zp.ZeroPlusFSDPStrategy
    assert zp.DeferredLinear and zp.DeferredGroupedLinear and zp.WeightGradStore and zp.defer_weight_grads


def test_importing_the_package_does_not_import_deepspeed() -> None:
    code = "import sys, lightning_zeroplus; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


class _OnMeta(Task):
    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()


def _meta() -> tuple[bool, bool, bool]:
    task = _OnMeta()
    assert next(task.parameters()).is_meta
    fit(ours(), task)
    full = weights(task)
    gathered = [torch.empty_like(full) for _ in range(2)]
    torch.distributed.all_gather(gathered, full)
    return bool(full.isfinite().all()), bool(full.std() > 0.01), torch.equal(*gathered)


def test_meta_device_initialization(ranks2: Any) -> None:
    assert ranks2.run(_meta) == [(True, True, True)] * 2


class _TwoStage(Task):
    """Shards its own children, with a policy of its own."""

    def configure_model(self) -> None:
        if isinstance(self.net, FSDPModule):
            return
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"], mp_policy=policy)


def _evaluates_then_fits() -> tuple[list[str], float]:
    task = _TwoStage()
    defer_weight_grads(task)
    strategy = ours()
    run = trainer(strategy, limit_val_batches=2)
    run.validate(task, loader(64), verbose=False)
    run.fit(task, loader(), loader(64))
    run.validate(task, loader(64), verbose=False)
    assert strategy._drain is None and type(run.precision_plugin).__name__ == "Precision"
    units = [name for name, module in task.named_modules() if isinstance(module, FSDPModule)]
    return units, task.losses[-1] - task.losses[0]


def test_a_module_that_shards_itself_keeps_its_units_and_fits_after_evaluation(ranks2: Any) -> None:
    for units, change in ranks2.run(_evaluates_then_fits):
        assert units == ["net"] and change < 0
