"""Windows on real engines: how often they reduce, in which dtype, what they hold, and what happens when they fail."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_zeroplus as zp
from lightning_zeroplus.callbacks.traffic import ReductionTraffic, StepTraffic
from lightning_zeroplus.engine.engine import ZeroPlusEngine
from lightning_zeroplus.engine.families.zero3 import Zero3Accumulation
from lightning_zeroplus.testing import train_reference
from tests.matrix.cells import trained_weights
from tests.support.training import BATCHES, Classifier, ManualClassifier, fit, relative_error, weights

#: Elements in a bucket. The parameters have 256, 32, 128 and 4.
BUCKET = 200


def _strategy(stage: int, **kwargs: Any) -> zp.ZeroPlusStrategy:
    zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": BUCKET}
    return zp.ZeroPlusStrategy(stage=stage, config={"zero_optimization": zero}, **kwargs)


def _buckets(stage: int) -> int:
    """Collectives of one flush: 210 elements of each rank in columns of 100, or [256], [32 + 128 + 4]."""
    return 3 if stage < 3 else 2


class _Windows(ManualClassifier):
    """A window of ``backwards`` chunks per batch; counts the reductions of each step."""

    def __init__(self, backwards: int = 4, window: str = "all", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.backwards, self.window = backwards, window
        self.steps: list[StepTraffic] = []
        self.held: list[list[int]] = []

    def on_train_start(self) -> None:
        self.traffic = ReductionTraffic(self.trainer.strategy.model, lambda: self.trainer.global_step)
        self.traffic.install()

    def on_train_end(self) -> None:
        self.traffic.observe()
        self.steps = self.traffic.drain_finished_steps()
        self.traffic.uninstall()

    def open(self) -> Any:
        coalesce = self.trainer.strategy.coalesce
        match self.window:
            case "all":
                return coalesce()
            case "backwards":
                return coalesce(backwards=self.backwards)
        return contextlib.nullcontext()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        held = []
        with self.open():
            chunks = zip(batch[0].chunk(self.backwards), batch[1].chunk(self.backwards), strict=True)
            for number, chunk in enumerate(chunks):
                syncs = self.window != "no_sync" or number == self.backwards - 1
                with contextlib.nullcontext() if syncs else self.trainer.strategy.model.no_sync():
                    self.manual_backward(self.loss(chunk) / self.backwards)
                held.append(self.trainer.strategy.model.gradient_accumulation.held_bytes())
        self.held.append(held)
        optimizer.step()
        optimizer.zero_grad()


def _count(strategy: dict[str, Any], backwards: int, window: str) -> list[int]:
    module = _Windows(backwards, window)
    fit(_strategy(**strategy), module, max_epochs=1, limit_train_batches=2)
    return [step.collectives for step in module.steps]


@pytest.mark.sampled
@pytest.mark.parametrize(("stage", "window"), [*product((1, 2, 3), ("all", "backwards", "no_sync", "step"))])
def test_reductions_do_not_depend_on_the_number_of_backwards(ranks2: Any, stage: int, window: str) -> None:
    reduction = "step" if window == "step" else "backward"
    single = ranks2.run(_count, {"stage": stage, "reduction": "backward"}, 1, "none")[0]
    each = ranks2.run(_count, {"stage": stage, "reduction": "backward"}, 4, "none")[0]
    assert each == [4 * count for count in single]
    in_hooks = stage > 1 and window in ("backwards", "no_sync")
    for backwards in (1, 4, 8):
        for counts in ranks2.run(_count, {"stage": stage, "reduction": reduction}, backwards, window):
            assert counts == (single if in_hooks else [_buckets(stage)] * 2)


class _Accumulating(Classifier):
    on_train_start, on_train_end = _Windows.on_train_start, _Windows.on_train_end


def _accumulate(strategy: dict[str, Any], batches: int) -> list[int]:
    module = _Accumulating(scheduler=None)
    fit(_strategy(**strategy), module, max_epochs=1, accumulate_grad_batches=batches)
    return [step.collectives for step in module.steps]


@pytest.mark.parametrize("stage", [2, 3])
def test_accumulate_grad_batches_reduces_once(ranks2: Any, stage: int) -> None:
    (single,) = set(ranks2.run(_accumulate, {"stage": stage, "reduction": "backward"}, 1)[0])
    assert ranks2.run(_accumulate, {"stage": stage, "reduction": "backward"}, BATCHES)[0] == [BATCHES * single]
    # The last batch is reduced by hooks while it runs; at stage 2 on the CPU by the step, as a window is at its end.
    once = _buckets(stage) if stage == 2 else single
    for counts in ranks2.run(_accumulate, {"stage": stage, "reduction": "step"}, BATCHES):
        assert counts == [once]


class _Nests(_Accumulating):
    """A loss whose hook runs nested backwards, in automatic optimization."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = torch.zeros((), requires_grad=True)

        def hook(grad: Tensor) -> None:
            with torch.enable_grad():
                for chunk in zip(batch[0].chunk(4), batch[1].chunk(4), strict=True):
                    self.loss(chunk).mul(grad / 4).backward()

        loss.register_hook(hook)
        return loss * 1


def _nest(stage: int) -> tuple[list[int], float]:
    module, plain = _Nests(scheduler=None), Classifier(scheduler=None)
    fit(_strategy(stage, reduction="step"), module, max_epochs=1)
    fit("ddp", plain, max_epochs=1)
    return [step.collectives for step in module.steps], relative_error(weights(module), weights(plain))


@pytest.mark.parametrize("stage", [2, 3])
def test_nested_backwards_are_found_out_and_then_reduced_once(ranks2: Any, stage: int) -> None:
    for counts, error in ranks2.run(_nest, stage):
        assert set(counts[1:]) == {_buckets(stage)}
        assert error <= 2e-6


# -- dtype -----------------------------------------------------------------------------------------------------------


class _Many(nn.Module):
    """64 backwards per step, on different data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))

    @staticmethod
    def backwards(net: nn.Module, batch: Any, backward: Any, index: int) -> None:
        for x, y in zip(batch[0].chunk(64), batch[1].chunk(64), strict=True):
            backward((net(x) - y).square().mean())


# So large that the update is the gradient, and the weights before it do not matter.
_RATE = 2.0**16


class _ManyLoop(ManualClassifier):
    def build(self) -> None:
        self.net = _Many().net

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with self.trainer.strategy.coalesce():
            _Many.backwards(self.net, batch, self.manual_backward, batch_idx)
        optimizer.step()
        self.after = trained_weights(self.net, self.trainer.strategy.model)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), _RATE)


def _many_data(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(256, 16, generator=generator), torch.randn(256, 8, generator=generator)


def _accumulation_error(stage: int, accumulate_dtype: Any, wire: str | None) -> float:
    from torch.utils.data import DataLoader

    from tests.support.training import trainer

    config: dict[str, Any] = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    if wire is not None:
        config["communication_data_type"] = wire
    strategy = zp.ZeroPlusStrategy(stage=stage, accumulate_dtype=accumulate_dtype, config=config)
    module = _ManyLoop()
    run = trainer(strategy, precision="bf16-true", max_epochs=1, use_distributed_sampler=False)
    run.fit(module, DataLoader([_many_data(int(os.environ["RANK"]))], batch_size=None))
    reference = train_reference(
        _Many().net.to(torch.bfloat16),
        lambda params: torch.optim.SGD(params, _RATE),
        _Many.backwards,
        [[tuple(part.to(torch.bfloat16) for part in _many_data(rank)) for rank in range(2)]],
    )
    want = torch.cat([param.flatten() for param in reference.params[0]])
    return relative_error(torch.cat([param.flatten() for param in module.after]), want)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_64_backwards_sum_in_fp32(ranks2: Any, stage: int) -> None:
    assert max(ranks2.run(_accumulation_error, stage, torch.float32, None)) <= 1e-6
    # One rounding to 8 bits before and one after the sum over the ranks.
    assert max(ranks2.run(_accumulation_error, stage, "float32", "bf16")) <= 3e-3
    # What the argument saves: a sum of 64 in bf16. The suite would notice if it did nothing.
    assert min(ranks2.run(_accumulation_error, stage, None, None)) >= 4e-3


@pytest.mark.parametrize("value", [torch.bfloat16, "double", 32])
def test_other_accumulation_dtypes_are_refused(value: Any) -> None:
    with pytest.raises(MisconfigurationException, match="`accumulate_dtype` must be None or torch.float32"):
        zp.ZeroPlusStrategy(accumulate_dtype=value)


def test_a_contradicting_accumulation_dtype_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="grad_accum_dtype"):
        zp.ZeroPlusStrategy(accumulate_dtype="float32", config={"data_types": {"grad_accum_dtype": "bf16"}})


# -- memory ----------------------------------------------------------------------------------------------------------


def _held(stage: int, window: str) -> list[int]:
    module = _Windows(4, window)
    fit(_strategy(stage, reduction="backward"), module, max_epochs=1, limit_train_batches=1)
    return module.held[0]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_last_backward_frees_what_it_reduces(ranks2: Any, stage: int) -> None:
    everything = 420 * 4
    assert ranks2.run(_held, stage, "all")[0] == [everything] * 4
    assert ranks2.run(_held, stage, "backwards")[0] == [everything] * 3 + [0]
    assert ranks2.run(_held, stage, "no_sync")[0] == [everything] * 3 + [0]
    assert ranks2.run(_held, stage, "none")[0] == [0] * 4


class _Budget(_Windows):
    def open(self) -> Any:
        return self.reporting()

    @contextlib.contextmanager
    def reporting(self) -> Any:
        with self.trainer.strategy.coalesce(max_bytes=700) as self.report:
            yield


def _within_budget(stage: int) -> tuple[Any, list[int], list[int]]:
    module = _Budget()
    fit(_strategy(stage, reduction="backward"), module, max_epochs=1, limit_train_batches=1)
    return tuple(module.report), module.held[0], [step.collectives for step in module.steps]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_budget_bounds_what_waits(ranks2: Any, stage: int) -> None:
    # In the order of backward 4 + 128 + 32 elements fill a bucket, and 256 are one by themselves.
    outcomes = ranks2.run(_within_budget, stage)
    assert outcomes[0] == outcomes[1]
    report, held, collectives = outcomes[0]
    assert report == (3, 656, 4, 1680)
    assert held == [656] * 4
    # Stage 1 reduces a rank's share of what is left in columns of 100 elements, the others in upstream's hooks.
    unlimited = ranks2.run(_count, {"stage": stage, "reduction": "backward"}, 4, "all")[0][0]
    each = ranks2.run(_count, {"stage": stage, "reduction": "backward"}, 4, "none")[0][0]
    assert unlimited < collectives[0] < each


def test_a_budget_holds_nothing_back_at_stage_0(ranks2: Any) -> None:
    report, held, collectives = ranks2.run(_within_budget, 0)[0]
    assert report == (4, 1680, 4, 1680)
    assert held == [1680] * 4
    assert collectives == [1]


# -- misuse ----------------------------------------------------------------------------------------------------------


def _step_inside(module: Any, batch: Any, optimizer: Any) -> None:
    with module.trainer.strategy.coalesce():
        module.manual_backward(module.loss(batch))
        optimizer.step()


def _step_in_no_sync(module: Any, batch: Any, optimizer: Any) -> None:
    with module.trainer.strategy.block_backward_sync():
        module.manual_backward(module.loss(batch))
        optimizer.step()


def _zero_grad_inside(module: Any, batch: Any, optimizer: Any) -> None:
    with module.trainer.strategy.coalesce():
        module.manual_backward(module.loss(batch))
        optimizer.zero_grad()


def _nested(module: Any, batch: Any, optimizer: Any) -> None:
    with module.trainer.strategy.coalesce(), module.trainer.strategy.coalesce():
        module.manual_backward(module.loss(batch))


def _left_open(module: Any, batch: Any, optimizer: Any) -> None:
    module.left = module.trainer.strategy.coalesce()
    module.left.__enter__()
    module.manual_backward(module.loss(batch))


def _left_open_and_dropped(module: Any, batch: Any, optimizer: Any) -> None:
    module.trainer.strategy.coalesce().__enter__()
    module.manual_backward(module.loss(batch))


class _Misuse(ManualClassifier):
    def __init__(self, misuse: Callable[..., None]) -> None:
        super().__init__()
        self.misuse = misuse

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.misuse(self, batch, self.optimizers())


def _misused(stage: int, misuse: Callable[..., None]) -> tuple[str, bool]:
    module = _Misuse(misuse)
    start = Classifier()
    try:
        fit(_strategy(stage), module)
    except RuntimeError as error:
        return str(error), torch.equal(weights(module), weights(start))
    return "nothing was raised", False


MISUSES: dict[Callable[..., None], str] = {
    _step_inside: "Step after the window",
    _step_in_no_sync: "inside no_sync",
    _zero_grad_inside: "inside a coalesce() window, after a backward",
    _nested: "coalesce() inside a coalesce() window",
    _left_open: "still open at the end of training_step",
    _left_open_and_dropped: "still open at the end of training_step",
}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.__name__.strip("_"))
def test_misuse_is_told_and_changes_no_weight(ranks2: Any, stage: int, misuse: Callable[..., None]) -> None:
    for message, unchanged in ranks2.run(_misused, stage, misuse):
        assert MISUSES[misuse] in message
        assert unchanged


class _WrongNumber(_Windows):
    """Announces 3 backwards and makes 2 or 4; catches the error and steps."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        try:
            super().training_step(batch, batch_idx)
        except RuntimeError as error:
            assert "`coalesce(backwards=3)` saw" in str(error), error
            self.caught = True
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()

    def open(self) -> Any:
        return self.trainer.strategy.coalesce(backwards=3)


def _wrong_number(stage: int, backwards: int) -> tuple[bool, float]:
    module, right = _WrongNumber(backwards), _Windows(backwards)
    fit(_strategy(stage, reduction="backward"), module)
    fit(_strategy(stage, reduction="backward"), right)
    return module.caught, relative_error(weights(module), weights(right))


@pytest.mark.sampled
@pytest.mark.parametrize(("stage", "backwards"), [*product((0, 1, 2, 3), (2, 4))])
def test_a_wrong_number_of_backwards_loses_no_gradient(ranks2: Any, stage: int, backwards: int) -> None:
    for caught, error in ranks2.run(_wrong_number, stage, backwards):
        assert caught
        assert error <= 2e-6


# -- exceptions ------------------------------------------------------------------------------------------------------


class _PlannedError(Exception):
    pass


class _RaisesInWindow(_Windows):
    """Every other batch fails in its window, on all ranks, and is left out."""

    def __init__(self, fails: bool, window: str) -> None:
        super().__init__(4, window)
        self.fails = fails
        self.reductions_of_failures: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            return super().training_step(batch, batch_idx)
        if not self.fails:
            return None
        before = self.traffic._collectives
        with contextlib.suppress(_PlannedError), self.open():
            for number, chunk in enumerate(zip(batch[0].chunk(4), batch[1].chunk(4), strict=True)):
                if number == 2:
                    before, raised = self.traffic._collectives, time.monotonic()
                    raise _PlannedError
                self.manual_backward(self.loss(chunk))
        self.reductions_of_failures.append(self.traffic._collectives - before)
        assert time.monotonic() - raised < 1
        assert not self.trainer.strategy.model.gradient_accumulation.held_bytes()
        return None


class _Caught(NamedTuple):
    error: float
    reductions: list[int]


def _caught(stage: int, window: str) -> _Caught:
    module, without = _RaisesInWindow(True, window), _RaisesInWindow(False, window)
    for each in (module, without):
        fit(_strategy(stage, reduction="step" if window == "step" else "backward"), each)
    return _Caught(relative_error(weights(module), weights(without)), module.reductions_of_failures)


@pytest.mark.sampled
@pytest.mark.parametrize(("stage", "window"), [*product((0, 1, 2, 3), ("all", "backwards"))])
def test_a_caught_exception_drops_the_window_without_a_collective(ranks2: Any, stage: int, window: str) -> None:
    for outcome in ranks2.run(_caught, stage, window):
        assert set(outcome.reductions) == {0}
        assert outcome.error == 0.0


def _reduce_in_any_case(self: Any, reduce: bool) -> None:
    self.gradient_accumulation.local_sums.close_window()
    self.gradient_accumulation.reduce_if_needed()


def _caught_by_a_flush_in_finally(stage: int) -> _Caught:
    with patch.object(ZeroPlusEngine, "close_window", _reduce_in_any_case):
        return _caught(stage, "all")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_flush_after_an_exception_would_be_seen(ranks2: Any, stage: int) -> None:
    """As upstream does."""
    for outcome in ranks2.run(_caught_by_a_flush_in_finally, stage):
        assert set(outcome.reductions) != {0}


class _BranchPerRank(ManualClassifier):
    """Each rank uses a head of its own, in some windows."""

    def build(self) -> None:
        torch.manual_seed(0)
        self.net = nn.ModuleDict({"trunk": nn.Linear(8, 16), "0": nn.Linear(16, 4), "1": nn.Linear(16, 4)})

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        return self.net[str(head)](torch.relu(self.net["trunk"](x)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        head = self.global_rank if batch_idx % 2 else 0
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            self.manual_backward(nn.functional.cross_entropy(self(x, head), y) / 2)
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)  # momentum would go on for the unused head under ZeRO


def _branch_per_rank(stage: int) -> float:
    ours, ddp = _BranchPerRank(), _BranchPerRank()
    fit(_strategy(stage, reduction="step"), ours)
    fit("ddp_find_unused_parameters_true", ddp)
    return relative_error(weights(ours), weights(ddp))


# At stage 3 the ranks gather parameters together, so they must use the same ones.
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_may_differ_within_a_window(ranks2: Any, stage: int) -> None:
    assert max(ranks2.run(_branch_per_rank, stage)) <= 2e-6


# -- what else upstream does -----------------------------------------------------------------------------------------


class _LeafModule(ManualClassifier):
    """A module that ZeRO-3 gathers as a whole, one branch of which is used in some backwards only."""

    def build(self) -> None:
        torch.manual_seed(0)
        self.net = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4), "head": nn.Linear(4, 4)})
        if self.leaf:
            from deepspeed.utils import set_z3_leaf_modules

            self.net["branches"] = _Branches(self.net.pop("a"), self.net.pop("b"))
            set_z3_leaf_modules(self.net, [_Branches])
        else:
            self.net["branches"] = _Branches(self.net.pop("a"), self.net.pop("b"))

    def __init__(self, leaf: bool, window: str | None) -> None:
        self.leaf, self.window = leaf, window
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return self.net["head"](self.net["branches"](x, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with self.around_all():
            for number in range(3):
                logits = self.net["head"](self.net["branches"](batch[0], number))
                with self.around(number):
                    self.manual_backward(nn.functional.cross_entropy(logits, batch[1]))
        optimizer.step()
        optimizer.zero_grad()

    def around_all(self) -> Any:
        arguments: dict[str, Any] = {"all": {}, "backwards": {"backwards": 3}, "budget": {"max_bytes": 100}}
        if self.window not in arguments:
            return contextlib.nullcontext()
        return self.trainer.strategy.coalesce(**arguments[self.window])

    def around(self, number: int) -> Any:
        waits = self.window == "no_sync" and number < 2
        return self.trainer.strategy.block_backward_sync() if waits else contextlib.nullcontext()


class _Experts(Classifier):
    def build(self) -> None:
        import deepspeed
        from deepspeed.moe.layer import MoE

        deepspeed.init_distributed("gloo", verbose=False)
        self.net = nn.Sequential(nn.Linear(8, 8), MoE(8, nn.Linear(8, 8), num_experts=2))


def _experts() -> str:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        fit(_strategy(2), _Experts())
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_expert_parallel_layers_are_refused(ranks2: Any) -> None:
    for message in ranks2.run(_experts):
        assert "mixture-of-experts layers of DeepSpeed ('net.1')" in message


class _Branches(nn.Module):
    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.a(x) + (self.b(x) if number else 0)


def _leaf_module(window: str | None) -> float:
    ours, ddp = _LeafModule(leaf=True, window=window), _LeafModule(leaf=False, window=None)
    zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10}
    fit(zp.ZeroPlusStrategy(stage=3, config={"zero_optimization": zero}), ours)
    fit("ddp_find_unused_parameters_true", ddp)
    return relative_error(weights(ours), weights(ddp))


def _leaf_module_reduced_in_its_hook(window: str | None) -> float:
    with patch.object(Zero3Accumulation, "postpone", lambda self, param: False):
        try:
            return _leaf_module(window)
        except RuntimeError:
            return float("inf")


@pytest.mark.parametrize("window", ["all", None])
def test_leaf_modules_reduced_in_their_hooks_lose_gradients(ranks2: Any, window: str | None) -> None:
    """As upstream does."""
    assert min(ranks2.run(_leaf_module_reduced_in_its_hook, window)) > 0.01


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("window", [None, "all", "backwards", "budget", "no_sync"])
def test_leaf_modules_of_stage_3(ranks2: Any, window: str | None) -> None:
    assert max(ranks2.run(_leaf_module, window)) <= 2e-6
