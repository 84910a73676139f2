"""After a fit a module is an ordinary one: nothing of an engine is left, and it trains on like a fresh copy."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

import lightning_zeroplus as zp
from lightning_zeroplus.testing import RankPool
from tests.matrix.cells import Cell
from tests.support.audited import audit
from tests.support.training import trainer
from tests.support.upstream import lightnings_strategy
from tests.weights import programs
from tests.weights.programs import Program, data, fit, largest_difference, state, strategy_of


class Ordinary(Program):
    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", (self.student(batch[0]) - batch[1]).square().mean(), sync_dist=True)


class Failing(Ordinary):
    def after(self, index: int) -> None:
        if index == 1:
            raise KeyError("on purpose")


class FailingInForward(Ordinary):
    def inside(self, index: int) -> None:
        if index == 1:
            self.student[3].register_forward_pre_hook(self._fail)

    def _fail(self, *_: Any) -> None:
        if type(self) is FailingInForward:
            raise KeyError("on purpose")


def _leftovers(module: nn.Module) -> list[str]:
    found = []
    for name, each in module.named_modules():
        found += [f"{name}.{key}" for key in vars(each)]
        hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
        found += [f"{name}.{key}" for key in hooks if vars(each)[key]]
        found += [f"{name} {type(each._parameters)}"] if type(each._parameters) is not dict else []
    for name, param in module.named_parameters():
        found += [f"{name} {type(param)}"] if type(param) is not nn.Parameter else []
        found += [f"{name}.{key}" for key in vars(param)]
        found += [f"{name} hooks"] if param._backward_hooks or param._post_accumulate_grad_hooks else []
    found += ["linear"] if nn.functional.linear is not torch._C._nn.linear else []
    found += ["init"] if hasattr(nn.init.normal_, "__wrapped__") else []
    return found


def _train_on(pairs: list[tuple[str, str]]) -> list[tuple[list[str], float, float]]:
    results = []
    ordinary = {*_leftovers(fit("ddp", Ordinary())), ".forward"}  # Lightning sets it, under our strategies too
    for first, second in pairs:
        module = fit(first, Ordinary())
        left = sorted(set(_leftovers(module)) - ordinary)
        fresh = Ordinary()
        fresh.load_state_dict(module.state_dict())
        start = state(fresh)
        other = state(fit(second, module))
        results.append((left, largest_difference(other, state(fit(second, fresh))), largest_difference(other, start)))
    return results


PAIRS = [("3", "ddp"), ("2", "ddp"), ("0", "ddp"), ("3 persistent", "1"), ("3", "3"), ("3", "fsdp"), ("1", "3")]


@pytest.mark.slow
def test_the_same_object_trains_like_a_fresh_copy(ranks2: RankPool) -> None:
    for pair, (left, difference, moved) in zip(PAIRS, ranks2.run(_train_on, PAIRS, timeout=300)[0], strict=True):
        assert left == [], pair
        assert difference == 0, pair
        assert moved > 0.01, pair


def _still_there(strategy: str) -> list[str]:
    """Where the module outlives all that the user has kept."""
    module = fit(strategy, Ordinary())
    fitted = weakref.ref(module)
    module = Ordinary()
    trainer(strategy_of(strategy), use_distributed_sampler=False).validate(module, data(), verbose=False)
    evaluated = weakref.ref(module)
    del module
    gc.collect()
    return [what for what, gone in (("fit", fitted), ("evaluation", evaluated)) if gone() is not None]


_REST = ("0", "1", "2", "3 persistent", "fsdp")


@pytest.mark.parametrize("strategy", ["3", *(pytest.param(each, marks=pytest.mark.thorough) for each in _REST)])
def test_nothing_keeps_the_module(ranks2: RankPool, strategy: str) -> None:
    """DeepSpeed's cache of what a module of stage 3 releases belongs to the process, and kept all engines."""
    assert ranks2.run(_still_there, strategy) == [[], []]


class Compiled(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.student = torch.compile(self.student, backend="eager")


def _leftovers_of_compiled(strategies: list[str]) -> list[list[str]]:
    ordinary = {*_leftovers(fit("ddp", Compiled())), ".forward"}
    found = []
    for strategy in strategies:
        module = fit(strategy, Compiled())
        assert type(module.student) is torch._dynamo.OptimizedModule, strategy
        left = set(_leftovers(module)) - ordinary
        found.append(sorted(name for name in left if "._dynamo" not in name))  # what Dynamo has seen in the engine
    return found


@pytest.mark.slow
def test_wrappers_of_compiled_modules_are_torchs_again(ranks2: RankPool) -> None:
    strategies = ["3", "2", "fsdp"]
    assert ranks2.run(_leftovers_of_compiled, strategies)[0] == [[], [], []]


def _fit_beside_another_engine() -> bool:
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    before, other = nn.functional.linear, nn.Linear(1, 1)
    nn.functional.linear = ours = lambda *args: before(*args)
    FWD_MODULE_STACK.append(other)  # as upstream does for an engine of stage 3, which Fabric leaves open
    try:
        fit("3", Ordinary())
        return nn.functional.linear is ours
    finally:
        FWD_MODULE_STACK.remove(other)
        nn.functional.linear = before


def test_beside_an_engine_that_stays_open(ranks2: RankPool) -> None:
    assert all(ranks2.run(_fit_beside_another_engine))


def _fit_with_secondary_partitions() -> bool:
    from deepspeed.utils import groups

    zero = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    strategy = zp.ZeroPlusStrategy(3, config={"zero_optimization": zero})
    module = Ordinary()
    start = state(module)
    trainer(strategy, max_epochs=1, use_distributed_sampler=False).fit(module, data(), data())
    assert largest_difference(state(module), start) > 0.01
    return groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is None


def test_secondary_partitions_end_with_the_fit(ranks2: RankPool) -> None:
    assert all(ranks2.run(_fit_with_secondary_partitions))


def _checkpoint_after(stage: str, folder: str) -> tuple[float, float]:
    """Of a module whose weights were changed after the fit."""
    module = Ordinary()
    run = trainer(strategy_of(stage), max_epochs=1, use_distributed_sampler=False)
    run.fit(module, data(), data())
    loss = float(run.validate(module, data(), verbose=False)[0]["loss"])
    run.fit_loop.max_epochs = 2
    run.fit(module, data(), data())
    with torch.no_grad():
        module.student[0].weight.mul_(2)
    run.save_checkpoint(f"{folder}/{stage}")
    resumed = Ordinary()
    other = trainer(strategy_of("2"), max_epochs=2, use_distributed_sampler=False)
    other.fit(resumed, data(), data(), ckpt_path=f"{folder}/{stage}")
    torch.save(module, io.BytesIO())
    # In a manual loop each rank has its own buffers, as under DDP, and a checkpoint has those of rank 0.
    names = [name for name in state(module) if other.is_global_zero or name in dict(module.named_parameters())]
    found, expected = ({name: each[name] for name in names} for each in (state(resumed), state(module)))
    return largest_difference(found, expected), loss


@pytest.mark.parametrize("stage", ["3", "1"])
def test_a_checkpoint_after_the_fit_has_the_weights_of_now(ranks2: RankPool, tmp_path: Path, stage: str) -> None:
    for difference, loss in ranks2.run(_checkpoint_after, stage, str(tmp_path)):
        assert difference == 0
        assert loss > 0


def _fail(stage: str, failing: type[Program] = Failing) -> tuple[str, str, float]:
    """What a read says after a fit that failed, and how another fit with a new strategy does."""
    module = failing()
    with pytest.raises(KeyError):
        fit(stage, module)
    try:
        said = str(module.student[0].weight.data.shape)
    except zp.PartitionedWeightError as error:
        said = type(error).__name__
    before = state(module)
    module.__class__ = Ordinary
    fresh = Ordinary()
    fresh.load_state_dict(before)
    return said, repr(nn.init.normal_), largest_difference(state(fit(stage, module)), state(fit(stage, fresh)))


@pytest.mark.parametrize(
    ("stage", "said"),
    [("3", "PartitionedWeightError"), ("fsdp", "PartitionedWeightError"), ("2", "torch.Size([8, 6])")],
)
@pytest.mark.parametrize("failing", [Failing, FailingInForward])
def test_after_a_fit_that_failed(ranks2: RankPool, stage: str, said: str, failing: type[Program]) -> None:
    for answer, function, difference in ranks2.run(_fail, stage, failing):
        assert answer == said
        assert "_gathering" not in function
        assert difference == 0


def _fail_after_lightnings() -> tuple[str, str, float]:
    assert audit(Cell(3, "several"), lightnings_strategy).error is not None
    return _fail("3")


def test_after_lightnings_own_fit_that_failed(ranks2: RankPool) -> None:
    """Its forward seems to go on."""
    for _, _, difference in ranks2.run(_fail_after_lightnings):
        assert difference == 0


def test_too_little_memory(ranks2: RankPool) -> None:
    for answer in ranks2.run(_without_memory):
        assert answer == "PartitionedWeightError"


def _without_memory() -> str:
    from lightning_zeroplus.weights.partitioned import ordinary

    share, ordinary._SHARE = ordinary._SHARE, 0.0
    try:
        module = fit("3", Ordinary())
    finally:
        ordinary._SHARE = share
    try:
        return str(module.student[0].weight.sum())
    except zp.PartitionedWeightError as error:
        return type(error).__name__


def _averaged(strategies: list[str], folder: str) -> list[tuple[dict[str, torch.Tensor], float]]:
    results = []
    for strategy in strategies:
        weights = []
        for save, load in ((None, None), (f"{folder}/{strategy}", None), (None, f"{folder}/{strategy}")):
            module = Ordinary()
            run = trainer(
                strategy_of(strategy),
                max_epochs=1 if save else 2,
                callbacks=[EMAWeightAveraging(decay=0.7), _Saving(save)],
                use_distributed_sampler=False,
            )
            run.fit(module, data(), data(), ckpt_path=load)
            weights.append(state(module))
        results.append((weights[0], largest_difference(weights[0], weights[-1])))
    return results


class _Saving(programs.pl.Callback):
    def __init__(self, path: str | None) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.path is not None:
            trainer.save_checkpoint(self.path)


def test_averaging_callbacks(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    """The averages of DDP, also after resuming."""
    (reference, _), *others = ranks(2).run(_averaged, ["ddp", "3", "2", "fsdp"], str(tmp_path), timeout=200)[0]
    for weights, after_resuming in others:
        assert largest_difference(weights, reference) == 0
        assert after_resuming == 0
