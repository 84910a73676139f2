"""GradientAudit: silent where gradients are right, loud where one is lost, doubled, stale, unscaled or rounded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_zeroplus as zp
from lightning_zeroplus.callbacks.audit.report import GradientMismatchError, default_tolerance
from tests.matrix.cells import Cell, pretend_fp16_kernels, strategy_for
from tests.matrix.test_mutations import CASES, MUTATIONS
from tests.support.audited import Audit, audit, ddp
from tests.support.training import ManualClassifier, loader, trainer, weights, zero_plus
from tests.support.upstream import lightnings_strategy, ours_without_accumulation

# -- right gradients pass -----------------------------------------------------------------------------------------

#: fp32: the order of a few additions. bf16, fp16: as ``tests.matrix.cells.BOUNDS``, but relative to the summed norms.
BOUNDS = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 1.5e-2}


def _id(cell: Cell) -> str:
    settings = {field: value for field, value in vars(cell).items() if value != getattr(Cell(0, ""), field)}
    return "-".join(str(value) for value in settings.values()) or "stage0"


DDP_CELLS = [
    Cell(0, "several"),
    Cell(0, "unused"),
    Cell(0, "tied"),
    Cell(0, "several", zero_grad="discard"),
    Cell(0, "several", across=2),
    Cell(0, "several", clip=(0.05, "norm")),
    Cell(0, "several", clip=(0.01, "value")),
    Cell(0, "several", automatic=True, across=2, precision="bf16-mixed"),
    Cell(0, "several", precision="bf16-true"),
]
OUR_CELLS = [
    *(Cell(stage, pattern) for stage in range(4) for pattern in ("several", "nested", "leaf_hook")),
    *(Cell(stage, "unused", offload="cpu") for stage in (2, 3)),
    *(Cell(stage, "several", precision="bf16-true") for stage in range(4)),
    *(Cell(stage, "several", precision="bf16-true", accumulate_dtype="float32") for stage in range(4)),
    *(Cell(stage, "several", precision=precision) for stage in range(4) for precision in ("bf16-mixed", "16-mixed")),
    *(Cell(stage, "nested", precision="16-true") for stage in range(4)),
    *(Cell(stage, "direct", precision="16-true") for stage in (0, 3)),
    *(Cell(stage, "several", clip=(0.05, "norm")) for stage in range(4)),
    *(Cell(stage, "several", clip=(0.01, "value")) for stage in range(4)),
    *(Cell(stage, "several", automatic=True, across=4) for stage in range(4)),
    *(Cell(stage, "unused", window="budget", zero_grad="before") for stage in (2, 3)),
    *(Cell(stage, "late_once", reduction="step", zero_grad="discard") for stage in (2, 3)),
    Cell(1, "several", precision="bf16-true", grad_accum_dtype="fp32"),
    Cell(2, "tied", zero={"reduce_scatter": False}),
    Cell(3, "same_loss_twice"),
]


def _check_right(first: Audit, second: Audit) -> None:
    assert first.error is None
    assert repr(first) == repr(second), "all ranks know the same"
    assert first.steps == 3 and {result.step for result in first.results} == {0, 1, 2}
    for result in first.results:
        coarsest = max((BOUNDS[dtype] for dtype in result.dtypes), default=0.0)
        assert result.error <= coarsest, result
    # An audit that saw nothing would pass too.
    assert sum(result.backwards[1] > 0 and len(result.dtypes) >= 2 for result in first.results) >= 3 * 5


@pytest.mark.parametrize("cell", DDP_CELLS, ids=_id)
def test_nothing_is_found_under_ddp(ranks2: Any, cell: Cell) -> None:
    _check_right(*ranks2.run(_three_steps, cell, ddp))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("cell", OUR_CELLS, ids=_id)
def test_nothing_is_found_under_ours(ranks2: Any, cell: Cell) -> None:
    _check_right(*ranks2.run(_three_steps, cell, strategy_for))


def _three_steps(cell: Cell, make_strategy: Any, mutation: str | None = None) -> Audit:
    return audit(cell, make_strategy, *([MUTATIONS[mutation]] if mutation else []), steps=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_default_tolerance_is_wider_than_what_rounding_does(dtype: torch.dtype) -> None:
    """64 backwards, each added in the low precision, in the measure of the audit: the tolerance is at least double."""
    grads = torch.randn(64, 10_000, generator=torch.Generator().manual_seed(0)).add_(0.5).to(dtype)
    total = torch.zeros(10_000, dtype=dtype)
    for grad in grads:
        total += grad
    error = (total.double() - grads.double().sum(0)).norm() / grads.double().norm(dim=1).sum()
    assert 0 < float(error) < default_tolerance([dtype]) / 2


# -- wrong ones are found -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_finding_one_is_found(ranks2: Any, stage: int) -> None:
    """Lightning's own strategy with one backward per step, and with four."""
    _check_right(*ranks2.run(_three_steps, Cell(stage, "single"), lightnings_strategy))
    for outcome in ranks2.run(_three_steps, Cell(stage, "several"), lightnings_strategy):
        assert outcome.error is not None and "after 4 backwards" in outcome.error
        assert outcome.steps == 1
        wrong = [result for result in outcome.results if not result.passed]
        assert {result.name.split(".")[1] for result in wrong} == {"first", "second", "head"}
        assert all(result.error > 0.3 and result.backwards == (4, 4) for result in wrong)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_that_does_not_happen_is_found(ranks2: Any, stage: int) -> None:
    for outcome in ranks2.run(_three_steps, Cell(stage, "single", clip=(0.05, "norm")), lightnings_strategy):
        assert outcome.error is not None and "times the expected ones" in outcome.error


def test_a_loss_scale_that_was_never_applied_is_found(ranks2: Any) -> None:
    cell = Cell(0, "single", precision="16-true")
    for outcome in ranks2.run(_three_steps, cell, ours_without_accumulation):
        assert outcome.error is not None and "All gradients are 0.007812 times" in outcome.error


# These make upstream raise by itself.
_LOUD = {
    "no flush before a second gradient",
    "epilogue of an idle backward",
    "consumed module counters",
}
#: Upstream reduces at its boundary, and at stage 1 nothing makes it buckets.
_LOUD_AT_STAGE_1 = "a boundary in every backward"
SILENT = [
    (mutation, cell)
    for mutation, cell in CASES
    if mutation not in _LOUD and (mutation, cell.stage) != (_LOUD_AT_STAGE_1, 1)
]


@pytest.mark.parametrize(
    ("mutation", "cell"), SILENT, ids=[f"{m.replace(' ', '_')}-stage{c.stage}-{c.pattern}" for m, c in SILENT]
)
def test_every_silent_mutation_of_the_engine_is_found(ranks2: Any, mutation: str, cell: Cell) -> None:
    """What the matrix sees from the weights, the audit sees without any reference."""
    assert all(outcome.error for outcome in ranks2.run(_three_steps, cell, strategy_for, mutation))


@contextmanager
def _sums_in_bf16() -> Iterator[None]:
    from lightning_zeroplus.engine.reduction.local_sums import LocalSums

    add = LocalSums.add

    def rounded(self: Any, index: int, param: Any) -> None:
        add(self, index, param)
        if index in self.sums:
            self.sums[index] = self.sums[index].bfloat16().float()

    with patch.object(LocalSums, "add", rounded):
        yield


def _audit_sums_in_bf16(stage: int, **arguments: Any) -> Audit:
    return audit(Cell(stage, "several", reduction="step"), strategy_for, _sums_in_bf16, **arguments)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sums_in_bf16_are_found(ranks2: Any, stage: int) -> None:
    for outcome in ranks2.run(_audit_sums_in_bf16, stage):
        assert outcome.error is not None and 1e-4 < outcome.worst < 1e-2


class _DDPWithHook(DDPStrategy):
    """Lightning registers hooks on CUDA only."""

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self.model.register_comm_hook(None, self.hook)


def _ddp_with(hook: Any) -> Audit:
    strategy = _DDPWithHook(find_unused_parameters=True, process_group_backend="gloo")
    strategy.hook = hook
    return audit(Cell(0, "several"), lambda cell: strategy)


def _no_reduction(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with classes
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _bf16_wire(state, bucket):  # type: ignore[no-untyped-def]
    low = bucket.buffer().bfloat16()
    dist.all_reduce(low)
    done: Any = torch.futures.Future()
    done.set_result(low.float() / dist.get_world_size())
    return done


@pytest.mark.parametrize(("hook", "least", "most"), [(_no_reduction, 1e-2, 2), (_bf16_wire, 1e-4, 1e-2)])
def test_a_communication_hook_of_ddp_is_found(ranks2: Any, hook: Any, least: float, most: float) -> None:
    for outcome in ranks2.run(_ddp_with, hook):
        assert outcome.error is not None and least < outcome.worst < most


# -- one process --------------------------------------------------------------------------------------------------


class _Several(ManualClassifier):
    """Two backwards per step; ``tamper`` is called right before the step."""

    tamper: Any = staticmethod(lambda module: None)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            self.manual_backward(self.loss((x, y)))
        self.tamper(self)
        optimizer.step()
        optimizer.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def _fit(module: pl.LightningModule, auditor: zp.GradientAudit, **kwargs: Any) -> zp.GradientAudit:
    arguments: dict[str, Any] = {"devices": 1, "max_epochs": 1, "limit_train_batches": 4, "callbacks": [auditor]}
    trainer("auto", **(arguments | kwargs)).fit(module, loader())
    return auditor


def _drop_one(module: Any) -> None:
    module.net[0].weight.grad = None


def _scale_all(module: Any) -> None:
    for param in module.parameters():
        param.grad.mul_(0.25)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_without_deepspeed_the_update_is_not_made() -> None:
    module = _Several()
    module.tamper = _drop_one
    before = weights(module)
    with pytest.raises(GradientMismatchError, match=r"1 of 4 parameters differ, most of all 'net.0.weight', by"):
        _fit(module, zp.GradientAudit())
    assert torch.equal(weights(module), before)


def test_scaling_by_hand_is_named() -> None:
    module = _Several()
    module.tamper = _scale_all
    with pytest.raises(
        GradientMismatchError, match="All gradients are 0.25 times the expected ones. If the loop clips"
    ):
        _fit(module, zp.GradientAudit())


def _take_out(module: Any) -> None:
    module.trainer.optimizers[0].param_groups[0]["params"].pop(0)


def test_a_parameter_that_the_optimizer_passes_over_is_found() -> None:
    module = _Several()
    module.tamper = _take_out
    with pytest.raises(GradientMismatchError, match="1 of 4 parameters differ, most of all 'net.0.weight'"):
        _fit(module, zp.GradientAudit())


def _scale_one_after_clipping(module: Any) -> None:
    module.clip_gradients(module.optimizers(), 1e-6, "value")
    module.net[0].weight.grad.mul_(0.999)


def test_an_error_after_clipping_by_value_is_seen_in_proportion() -> None:
    module = _Several()
    module.tamper = _scale_one_after_clipping
    with pytest.raises(GradientMismatchError, match="1 of 4 parameters differ, most of all 'net.0.weight'"):
        _fit(module, zp.GradientAudit())


class _CallsItsBase(torch.optim.SGD):
    """The hooks of ``step`` run twice."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, _CallsItsBase, partial(torch.optim.SGD, fused=True)])
def test_a_gradient_scaler(optimizer: Any) -> None:
    """A fused optimizer gets scaled gradients, and the scale."""

    class Scaled(_Several):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), 0.01)

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    auditor = _fit(Scaled(), zp.GradientAudit(steps=3), plugins=[plugin], limit_train_batches=2)
    assert auditor.audited_steps == 2 and len(auditor.results) == 2 * 4
    assert 0 <= max(result.error for result in auditor.results) < 1e-6


def test_warning_goes_on_and_the_table_tells(capsys: pytest.CaptureFixture[str]) -> None:
    module = _Several()
    module.tamper = _drop_one
    with pytest.warns(UserWarning, match="differ, most of all 'net.0.weight'"):
        auditor = _fit(module, zp.GradientAudit(steps=3, on_mismatch="warn"))
    assert auditor.audited_steps == 3 and len(auditor.results) == 3 * 4
    lines = [line for line in capsys.readouterr().out.splitlines() if "net." in line]
    assert len(lines) == 4 and "WRONG" in lines[0] and "net.0.weight" in lines[0]
    assert sum("WRONG" in line for line in lines) == 1


def test_a_table_without_rich(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.dict("sys.modules", {"rich.console": None}):
        _fit(_Several(), zp.GradientAudit(steps=1))
    lines = capsys.readouterr().out.splitlines()
    assert "1 optimizer step: all 4 parameters agree" in lines[0]
    assert lines[1].split() == ["parameter", "backwards", "error", "projection", "dtypes"]
    assert [line.split()[1] for line in lines[2:]] == ["2"] * 4


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool) -> None:
    class Looks(_Several):
        left: list[Any] = []

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.left.append(_left(self))

    module = Looks()
    if fails:
        module.tamper = _drop_one
        with pytest.raises(GradientMismatchError):
            _fit(module, zp.GradientAudit(steps=1))
    else:
        _fit(module, zp.GradientAudit(steps=1))
        # Callbacks come before the module's own hook: the audit is over when the first batch has ended.
        assert module.left == [[]] * 4
    assert _left(module) == []
    assert "zero_grad" not in module.__dict__ and "clip_gradients" not in module.trainer.precision_plugin.__dict__


def _left(module: pl.LightningModule) -> list[Any]:
    hooks = [hook for param in module.parameters() for hook in (param._backward_hooks or {})]
    for optimizer in module.trainer.optimizers:
        hooks += [hook for hook in optimizer._optimizer_step_pre_hooks]
        hooks += [name for name in optimizer.__dict__ if name == "zero_grad"]
    return hooks + [name for name in module.trainer.precision_plugin.__dict__ if name == "backward"]


class _Adversarial(ManualClassifier):
    """Two optimizers; the second's gradients come from its own loss only, but the first's loss reaches them, too."""

    def build(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[index].parameters(), 0.01) for index in (0, 2)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(first, 0.01, "norm")
        first.step()
        first.zero_grad()
        self.reset(second)
        self.manual_backward(self.loss(batch))
        second.step()
        self.zero_grad()

    def reset(self, second: Any) -> None:
        second.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def test_two_optimizers_each_have_their_own_gradients() -> None:
    auditor = _fit(_Adversarial(), zp.GradientAudit(steps=2))
    assert auditor.audited_steps == 4
    names = [[result.name for result in auditor.results if result.step == step] for step in range(4)]
    assert names == [["net.0.weight", "net.0.bias"], ["net.2.weight", "net.2.bias"]] * 2
    assert all(result.error < 1e-6 and result.backwards == (1, 1) for result in auditor.results)


def test_gradients_that_are_not_zeroed_add_up_as_the_optimizer_sees_them() -> None:
    class Keeps(_Adversarial):
        def reset(self, second: Any) -> None:
            pass

    auditor = _fit(Keeps(), zp.GradientAudit(steps=2))
    assert [result.backwards for result in auditor.results if result.name == "net.2.bias"] == [(2, 2)] * 2
    assert all(result.error < 1e-6 for result in auditor.results)


class _Unfreezes(_Several):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx > 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def test_parameters_that_are_unfrozen_are_audited() -> None:
    module = _Unfreezes()
    module.net[0].requires_grad_(False)
    auditor = _fit(module, zp.GradientAudit(steps=3))
    names = [{result.name for result in auditor.results if result.step == step} for step in range(3)]
    everything = {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}
    assert names[0] == {"net.2.weight", "net.2.bias"} and names[2] == everything


class _Clips(_Several):
    tamper: Any = staticmethod(lambda module: module.clip_gradients(module.optimizers(), 0.01, "norm"))


def test_some_parameters_only() -> None:
    auditor = _fit(_Clips(), zp.GradientAudit(parameters=["*.bias", "nothing"]))
    assert {result.name for result in auditor.results} == {"net.0.bias", "net.2.bias"}
    assert all(result.error < 1e-6 for result in auditor.results)
    assert all(0 < result.ratio < 0.5 for result in auditor.results), "the factor of the clipping is fitted"

    class Loses(_Several):
        tamper: Any = staticmethod(lambda module: (_Clips.tamper(module), module.net[0].bias.grad.mul_(0.5)))

    with pytest.raises(GradientMismatchError, match="most of all 'net.0.bias'"):
        _fit(Loses(), zp.GradientAudit(parameters="*.bias"))


def test_a_gradient_that_cancels_is_measured_by_what_cancels() -> None:
    """The sum is rounding, and its relative error is large; the terms are not, and theirs is small."""

    class Cancels(_Several):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for sign in (1, -1, 1, -1):
                self.manual_backward(sign * self.loss((batch[0] / 3, batch[1])))
            for param in self.parameters():
                param.grad.add_(torch.randn_like(param), alpha=1e-9)
            optimizer.step()
            optimizer.zero_grad()

    auditor = _fit(Cancels(), zp.GradientAudit())
    assert 0 < max(result.error for result in auditor.results) < 1e-6


def test_a_closure_is_audited_after_it_has_run() -> None:
    class Closure(_Several):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().step(closure=partial(self.run, batch))

        def run(self, batch: Any) -> Tensor:
            self.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

    auditor = _fit(Closure(), zp.GradientAudit())
    assert {result.backwards for result in auditor.results} == {(1, 1)}
    assert max(result.error for result in auditor.results) == 0


def _poison(module: Any) -> None:
    _Clips.tamper(module)
    module.net[0].bias.grad[0] = math.nan


@pytest.mark.parametrize("parameters", ["*", "*.bias"])
def test_a_gradient_that_turns_nan_on_its_way_is_found(parameters: str) -> None:
    module = _Several()
    module.tamper = _poison
    with pytest.raises(GradientMismatchError, match="'net.0.bias', by inf"):
        _fit(module, zp.GradientAudit(parameters=parameters))


def test_gradients_that_are_not_finite_are_not_judged() -> None:
    class Explodes(_Several):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * math.inf

    auditor = _fit(Explodes(), zp.GradientAudit())
    assert all(math.isnan(result.error) and result.passed for result in auditor.results)


def test_a_fit_without_a_step_says_that_nothing_was_audited() -> None:
    class NeverSteps(_Several):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))

    with pytest.warns(UserWarning, match="saw 4 backwards and no optimizer step: it has audited nothing"):
        _fit(NeverSteps(), zp.GradientAudit())


# -- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "`steps` must be a positive integer, not 0"),
        ({"steps": True}, "`steps` must be a positive integer, not True"),
        ({"tolerance": -1.0}, "`tolerance` must be None or a number of at least 0, not -1.0"),
        ({"tolerance": math.nan}, "`tolerance` must be None or a number of at least 0, not nan"),
        ({"on_mismatch": "ignore"}, '`on_mismatch` must be "raise" or "warn", not \'ignore\''),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zp.GradientAudit(**arguments)


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(MisconfigurationException, match="matches no parameter of `_Several`.*'net.0.weight'"):
        _fit(_Several(), zp.GradientAudit(parameters="encoder.*"))


def test_a_strategy_that_cannot_be_audited() -> None:
    from lightning.pytorch.strategies import FSDPStrategy

    run: Any = trainer("auto", devices=1)
    run._accelerator_connector.strategy = FSDPStrategy()  # a Trainer would refuse it without a GPU
    with pytest.raises(MisconfigurationException, match="cannot audit `FSDPStrategy`.* under `zeroplus_fsdp`"):
        zp.GradientAudit().setup(run, _Several(), "fit")


def _overflow(stage: int, precision: str) -> tuple[int, float, int]:
    pretend_fp16_kernels()
    # Overflows in the first steps, and is halved by each of them.
    fp16 = {"initial_scale_power": 22, "hysteresis": 1, "loss_scale_window": 1000}
    strategy = zero_plus(stage, {"fp16": fp16})
    auditor = zp.GradientAudit()

    class Overflows(_Several):
        skipped = 0

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.skipped = self.trainer.strategy.model.skipped_steps

    module = Overflows()
    trainer(strategy, precision=precision, max_epochs=4, callbacks=[auditor]).fit(module, loader())
    return auditor.audited_steps, max(result.error for result in auditor.results), module.skipped


class _NeverZeroes(_Several):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


def _audit_never_zeroed(stage: int | None) -> tuple[int, bool]:
    auditor = zp.GradientAudit(steps=3)
    strategy = "ddp" if stage is None else zero_plus(stage)
    trainer(strategy, max_epochs=1, callbacks=[auditor]).fit(_NeverZeroes(), loader(160))
    return auditor.audited_steps, max(result.error for result in auditor.results) < BOUNDS["fp32"]


@pytest.mark.parametrize("stage", [None, 0, 2, 3])
def test_gradients_that_add_up_over_the_steps(ranks2: Any, stage: int | None) -> None:
    assert ranks2.run(_audit_never_zeroed, stage) == [(3, True)] * 2


class _Derives(_Several):
    """A backward with ``create_graph``, whose loss has no loss scale in fp16, and an ordinary one."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch), create_graph=True)
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.optimizers().zero_grad()


def _audit_derivatives(stage: int) -> float:
    pretend_fp16_kernels()
    auditor = zp.GradientAudit()
    strategy = zero_plus(stage, {"fp16": {"loss_scale": 128}})
    trainer(strategy, precision="16-true", max_epochs=1, callbacks=[auditor]).fit(_Derives(), loader(64))
    assert auditor.audited_steps == 2
    return max(result.error for result in auditor.results)


@pytest.mark.parametrize("stage", [0, 3])
def test_backwards_with_and_without_a_loss_scale(ranks2: Any, stage: int) -> None:
    assert max(ranks2.run(_audit_derivatives, stage)) < BOUNDS["fp16"]


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["16-true", "16-mixed"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_steps_that_overflow_are_not_audited(ranks2: Any, stage: int, precision: str) -> None:
    for steps, error, skipped in ranks2.run(_overflow, stage, precision):
        assert skipped > 0 and steps == 2 and error < BOUNDS["fp16"]
