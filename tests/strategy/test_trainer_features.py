"""What the Trainer offers, at every stage: the parameters must be those that DDP trains."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_zeroplus as zp
from tests.matrix.cells import pretend_fp16_kernels
from tests.support.training import (
    BATCHES,
    Classifier,
    ManualClassifier,
    fit,
    loader,
    relative_error,
    trainer,
    weights,
    zero_plus,
)

STAGES = (0, 1, 2, 3)
#: fp32; the ranks may add in another order than DDP's buckets.
BOUND = 1e-6


@functools.cache
def _with_ddp(module: type[Classifier], module_args: Any = (), trainer_args: Any = ()) -> torch.Tensor:
    """The weights, the same for every stage; arguments as items, which can be hashed."""
    return weights(fit("ddp", module(**dict(module_args)), **dict(trainer_args)))


def _fit_both(stage: int, module: type[Classifier], module_args: dict[str, Any], trainer_args: dict[str, Any]) -> float:
    want = _with_ddp(module, tuple(module_args.items()), tuple(trainer_args.items()))
    got = weights(fit(zero_plus(stage), module(**module_args), **trainer_args))
    return relative_error(got, want)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "adamw": ({"optimizer": "adamw"}, {}),
    "scheduler-step": ({"scheduler": "step"}, {}),
    "scheduler-plateau": ({"scheduler": "plateau"}, {}),
    "configure-model": ({"sharded_init": True}, {}),
    "accumulate": ({}, {"accumulate_grad_batches": 3}),
    "clip-norm": ({}, {"gradient_clip_val": 0.1}),
    "clip-value": ({}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", CASES)
def test_trains_as_ddp(ranks2: Any, stage: int, case: str) -> None:
    module_args, trainer_args = CASES[case]
    assert max(ranks2.run(_fit_both, stage, Classifier, module_args, trainer_args)) <= BOUND


class _OverridesBackward(Classifier):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class _StepsWithoutBackward(ManualClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if batch_idx % 2 == 0:
            self.manual_backward(self.loss(batch))
        optimizer.step()


class _StepsWithClosure(ManualClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        assert optimizer.step(closure) is not None


class _VectorJacobian(ManualClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        logits = self(batch[0])
        self.manual_backward(logits, gradient=torch.full_like(logits, 0.25))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.sampled
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("module", [_OverridesBackward, _StepsWithoutBackward, _StepsWithClosure, _VectorJacobian])
def test_unusual_loops_train_as_ddp(ranks2: Any, stage: int, module: type[Classifier]) -> None:
    assert max(ranks2.run(_fit_both, stage, module, {}, {})) <= BOUND


def _clip_manually(stage: int, algorithm: str, limit: float) -> tuple[float, list[float | None]]:
    class Clips(ManualClassifier):
        norms: list[float | None] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
                self.manual_backward(self.loss((x, y)))
            if not hasattr(self.trainer.strategy, "grad_norm"):
                self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])))
            self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)
            optimizer.step()
            if hasattr(self.trainer.strategy, "grad_norm"):
                self.norms.append(self.trainer.strategy.grad_norm())
            optimizer.zero_grad()

    Clips.norms = []
    want, want_norms = weights(fit("ddp", Clips())), Clips.norms
    Clips.norms = []
    got, got_norms = weights(fit(zero_plus(stage), Clips())), Clips.norms
    assert len(want_norms) == len(got_norms) == 2 * BATCHES
    assert max(want_norms) > limit, "nothing to clip: the test would prove nothing"
    worst = max(abs(g - w) / w for g, w in zip(got_norms, want_norms, strict=True))
    return max(relative_error(got, want), worst), got_norms


@pytest.mark.sampled
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.2), ("value", 0.02)])
def test_manual_clipping_and_grad_norm(ranks2: Any, stage: int, algorithm: str, limit: float) -> None:
    """Lightning's DeepSpeed precision ignores ``self.clip_gradients`` without a word."""
    for error, norms in ranks2.run(_clip_manually, stage, algorithm, limit):
        assert error <= BOUND
        assert all(norm is not None for norm in norms)


def _evaluate_after_fit(stage: int) -> tuple[dict[str, float], dict[str, float], int, float]:
    module = Classifier()
    run = trainer(zero_plus(stage))
    run.fit(module, loader(), loader(64))
    trained = {key: float(value) for key, value in run.callback_metrics.items()}
    (validated,) = run.validate(module, loader(64), verbose=False)
    (tested,) = run.test(module, loader(64), verbose=False)
    assert validated == tested
    error = relative_error(weights(module), _with_ddp(Classifier))
    return trained, validated, len(run.predict(module, loader(64))), error


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("stage", STAGES)
def test_validate_test_predict_after_fit(ranks2: Any, stage: int) -> None:
    for trained, validated, predictions, error in ranks2.run(_evaluate_after_fit, stage):
        assert validated["val_acc"] == pytest.approx(trained["val_acc"]) and validated["val_acc"] > 0.5
        assert predictions == 2
        assert error <= BOUND


def _fit_twice(stage: int, same_trainer: bool) -> float:
    results = []
    for strategy in ("ddp", zero_plus(stage)):
        module, run = Classifier(), trainer(strategy)
        run.fit(module, loader(), loader(64))
        if same_trainer:
            run.fit_loop.max_epochs = 4
        else:
            run = trainer("ddp" if strategy == "ddp" else zero_plus(stage))
        run.fit(module, loader(), loader(64))
        results.append(weights(module))
    return relative_error(results[1], results[0])


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("same_trainer", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_fit_twice(ranks2: Any, stage: int, same_trainer: bool) -> None:
    """The second engine must not share the parameters with the first one's hooks."""
    assert max(ranks2.run(_fit_twice, stage, same_trainer)) <= BOUND


def _callbacks(stage: int, directory: str) -> tuple[dict[str, list[float]], list[str], float]:
    lr = LearningRateMonitor()
    checkpoint = ModelCheckpoint(directory, monitor="val_acc", mode="max", save_last=True)
    stop = EarlyStopping("val_loss", min_delta=1e9, patience=0)
    run = trainer(
        zero_plus(stage),
        callbacks=[lr, checkpoint, stop],
        enable_checkpointing=True,
        logger=CSVLogger(directory),
        max_epochs=10,
    )
    run.fit(Classifier(), loader(), loader(64))
    return lr.lrs, sorted(name for name in os.listdir(directory) if name.endswith(".ckpt")), run.current_epoch


@pytest.mark.parametrize("stage", STAGES)
def test_callbacks(ranks2: Any, stage: int, tmp_path: Path) -> None:
    for lrs, checkpoints, epochs in ranks2.run(_callbacks, stage, str(tmp_path)):
        assert list(lrs) == ["lr-SGD"] and lrs["lr-SGD"][0] == 0.05 and len(lrs["lr-SGD"]) == 2
        assert "last.ckpt" in checkpoints and len(checkpoints) >= 2
        assert epochs == 2, "EarlyStopping asked to stop after the second epoch"


def _resume(stage: int, directory: str, offload: str | None) -> tuple[float, float]:
    straight = weights(fit(zero_plus(stage, offload=offload), max_epochs=4))
    checkpoint = ModelCheckpoint(directory, save_last=True)
    fit(zero_plus(stage, offload=offload), callbacks=[checkpoint], enable_checkpointing=True, max_epochs=2)
    # Another seed, so that only the checkpoint can bring the right weights.
    resumed = Classifier(seed=7)
    run = trainer(zero_plus(stage, offload=offload), max_epochs=4)
    run.fit(resumed, loader(), loader(64), ckpt_path=checkpoint.last_model_path)
    assert run.global_step == 4 * BATCHES
    want = float(run.callback_metrics["val_acc"])
    # The checkpoint of two epochs into a fresh module, for evaluation only.
    after_two = fit(zero_plus(stage, offload=offload), max_epochs=2)
    fresh = Classifier(seed=7)
    trainer(zero_plus(stage, offload=offload)).test(
        fresh, loader(64), ckpt_path=checkpoint.last_model_path, verbose=False
    )
    assert relative_error(weights(fresh), weights(after_two)) == 0
    assert want > 0.5
    return relative_error(weights(resumed), straight), want


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (0, None),
        pytest.param(1, None, marks=pytest.mark.slow),
        pytest.param(2, None, marks=pytest.mark.slow),
        (3, None),
        (2, "cpu"),
        pytest.param(3, "cpu", marks=pytest.mark.slow),
    ],
)
def test_resume_is_exact(ranks2: Any, stage: int, offload: str | None, tmp_path: Path) -> None:
    for error, _ in ranks2.run(_resume, stage, str(tmp_path), offload):
        assert error == 0


class _Misuses(ManualClassifier):
    """Does what ZeRO cannot do as DDP does, and keeps the errors."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.errors: dict[str, str] = {}
        for _ in range(2):
            optimizer.zero_grad()  # a loop that zeroes its gradients: they are not kept
            self.manual_backward(self.loss(batch))
            optimizer.step()
        if self.trainer.strategy.stage > 0:  # type: ignore[attr-defined]  # stage 0 has all gradients, and keeps them
            self._expect("step twice", optimizer.step)
            self.manual_backward(self.loss(batch))
            self._expect("step on top of the previous gradient", optimizer.step)
        optimizer.zero_grad()
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, 1.0, "norm")
        self._expect("backward after clipping", lambda: self.manual_backward(self.loss(batch)))
        optimizer.step()
        optimizer.zero_grad()

    def _expect(self, what: str, action: Any) -> None:
        before = weights(self)
        try:
            action()
        except (RuntimeError, MisconfigurationException) as error:
            self.errors[what] = str(error)
        assert torch.equal(weights(self), before), what


def _misuse(stage: int) -> dict[str, str]:
    return fit(zero_plus(stage), _Misuses(), max_steps=1, limit_train_batches=1, max_epochs=1).errors


@pytest.mark.parametrize("stage", STAGES)
def test_what_would_differ_from_ddp_raises_before_anything_moves(ranks2: Any, stage: int) -> None:
    for errors in ranks2.run(_misuse, stage):
        of_steps = {"step twice", "step on top of the previous gradient"} if stage > 0 else set()
        assert set(errors) == {"backward after clipping", *of_steps}
        assert all("zero_grad()" in errors[name] for name in of_steps)
        assert "from within no_sync()" in errors["backward after clipping"]


class _Branches(ManualClassifier):
    """In one step each rank uses a head of its own."""

    def __init__(self, first_branch: int) -> None:
        super().__init__()
        self.first_branch = first_branch

    def build(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.ModuleList([torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)])  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net[self.branch](x)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        # Found at once in the first steps, else when 16 steps are full.
        self.branch = self.global_rank if self.trainer.global_step == self.first_branch else 0
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)  # momentum would go on for the unused head under ZeRO


def _branch(stage: int, step: int) -> float:
    want = weights(fit("ddp_find_unused_parameters_true", _Branches(step), max_epochs=4))
    return relative_error(weights(fit(zero_plus(stage), _Branches(step), max_epochs=4)), want)


@pytest.mark.sampled
@pytest.mark.parametrize("step", [1, 9])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_take_different_branches(ranks2: Any, stage: int, step: int) -> None:
    for error in ranks2.run(_branch, stage, step):
        assert error <= BOUND


class _ForwardsOnly(_Branches):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.branch = self.global_rank
        self(batch[0])  # its weights stay for a backward that does not come


def _forwards(threshold: int) -> float:
    module, fresh = _ForwardsOnly(0), _ForwardsOnly(0)
    zero = {"stage3_param_persistence_threshold": threshold}
    fit(zp.ZeroPlusStrategy(stage=3, config={"zero_optimization": zero}), module)
    return relative_error(weights(module), weights(fresh))


@pytest.mark.parametrize("threshold", [0, 6])
def test_whole_weights_after_forwards_of_different_modules(ranks2: Any, threshold: int) -> None:
    assert ranks2.run(_forwards, threshold) == [0, 0]


class _Overflows(ManualClassifier):
    """Notes what became of each step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = weights(self)  # not in training_step: stage 3 prefetches parameters there

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        unmoved = bool(torch.equal(self.before, weights(self)))
        self.steps = [*getattr(self, "steps", []), (self.trainer.strategy.grad_norm(), unmoved)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            self.manual_backward(self.loss((x, y)))
        optimizer.step()
        optimizer.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def steps_after_overflows(stage: int, reduction: str, precision: str) -> list[tuple[float, bool]]:
    """Of each step of a fit whose first steps overflow: the norm, and whether no weight moved."""
    pretend_fp16_kernels()
    # A scale that overflows in the first steps, and is halved by each of them.
    fp16 = {"initial_scale_power": 22, "hysteresis": 1, "loss_scale_window": 1000}
    strategy = zero_plus(stage, {"fp16": fp16}, reduction=reduction)
    return fit(strategy, _Overflows(), precision=precision, max_epochs=2).steps


def check_overflows(ranks: list[list[tuple[float, bool]]]) -> None:
    """The same steps are skipped on all ranks, until the scale fits."""
    first, second = ranks
    assert first == second
    skipped = [norm == float("inf") for norm, _ in first]
    assert skipped[0] and not skipped[-1], first
    assert skipped == sorted(skipped, reverse=True), "once the scale fits, every step counts"
    assert all(unmoved == skip for (_, unmoved), skip in zip(first, skipped, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["16-true", "16-mixed"])
@pytest.mark.parametrize("reduction", ["backward", "step"])
@pytest.mark.parametrize("stage", STAGES)
def test_fp16_overflow_skips_the_step_on_all_ranks(ranks2: Any, stage: int, reduction: str, precision: str) -> None:
    check_overflows(ranks2.run(steps_after_overflows, stage, reduction, precision))


def _fp16_without_kernels() -> str:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator import get_accelerator

    with patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: False):
        try:
            fit(zero_plus(2), precision="16-mixed")
        except MisconfigurationException as error:
            return str(error)
    return "trained"


def test_fp16_without_kernels_is_refused(ranks2: Any) -> None:
    for message in ranks2.run(_fp16_without_kernels):
        assert "precision='16-mixed'" in message and 'Use `precision="bf16-true"`' in message
