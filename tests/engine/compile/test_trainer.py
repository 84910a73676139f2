"""``ZeroPlusStrategy(compile=...)`` under a Trainer: the same weights and metrics as DDP."""

from __future__ import annotations

import io
import itertools
from contextlib import nullcontext, redirect_stdout
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_zeroplus as zp
from lightning_zeroplus.callbacks.audit.report import GradientMismatchError
from lightning_zeroplus.gradients.dtype import normalized
from lightning_zeroplus.strategy.deepspeed.compilation import regions
from tests.engine.compile.training import brief_profiles
from tests.support.training import BATCHES, Classifier, loader, relative_error, trainer, weights, zero_plus

EAGER = {"backend": "eager"}


class Skipped(nn.Module):
    """A loop with a graph break, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 4)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a,):
            x = torch.relu(layer(x)) * self.scale
            torch._dynamo.graph_break()
        return self.b(x)


class Module(Classifier):
    """``training_step`` calls ``self(x)``, which uses a child and a parameter of the LightningModule itself."""

    def build(self) -> None:
        torch.manual_seed(0)
        self.net = Skipped()
        self.temperature = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.temperature


class Manual(Module):
    """Two backwards before a step, in a window where there is one."""

    def __init__(self) -> None:
        super().__init__(scheduler=None)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        strategy: Any = self.trainer.strategy
        with strategy.coalesce() if hasattr(strategy, "coalesce") else nullcontext():
            for part in range(2):
                self.manual_backward(nn.functional.cross_entropy(self(batch[0][part::2]), batch[1][part::2]))
        optimizer.step()


def _fit(strategy: Any, module: Any, **kwargs: Any) -> tuple[Tensor, float]:
    inner = getattr(module, "_orig_mod", module)
    run = trainer(strategy, max_epochs=1, **kwargs)
    run.fit(module, loader(), loader(64))
    assert inner.net._compiled_call_impl is None  # undone
    return weights(inner), float(run.callback_metrics["val_acc"])


def _against_ddp(stage: int, cls: type[Module], precision: Any) -> tuple[float, float]:
    found, accuracy = _fit(zero_plus(stage, compile=EAGER), cls(), precision=precision)
    wanted, expected = _fit("ddp", cls())
    return relative_error(found, wanted), abs(accuracy - expected)


@pytest.mark.sampled
@pytest.mark.parametrize("cls", [Module, Manual])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fit_and_validate(ranks2: Any, stage: int, cls: type[Module]) -> None:
    for error, accuracy in ranks2.run(_against_ddp, stage, cls, "32-true"):
        assert error <= 1e-6 and accuracy == 0


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("stage", [2, 3])
def test_bf16(ranks2: Any, stage: int) -> None:
    for error, _ in ranks2.run(_against_ddp, stage, Module, "bf16-true"):
        assert error <= 1.5e-2


def _taken_over() -> float:
    found, _ = _fit(zero_plus(3), torch.compile(Module(), backend="eager"))
    wanted, _ = _fit("ddp", Module())
    return relative_error(found, wanted)


def test_a_compiled_module_is_compiled_with_deepcompile(ranks2: Any) -> None:
    assert max(ranks2.run(_taken_over)) <= 1e-6


def _process_state() -> list[bool]:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.compile import backend, util
    from torch._dynamo.guards import GuardBuilder
    from torch._subclasses import FakeTensorMode

    def state() -> list[Any]:
        return [
            GuardBuilder.TENSOR_MATCH,
            FakeTensorMode.from_tensor,
            torch._dynamo.variables.builder.wrap_to_fake_tensor_and_record,
            torch.autograd.Function,
            torch._inductor.config.size_asserts,
            torch._functorch.config.donated_buffer,
            torch._dynamo.config.force_parameter_static_shapes,
            torch._dynamo.config.force_nn_module_property_static_shapes,
            backend.run_opt_passes,
            util.dc_handle,
            list(util.pre_backward_hooks),
            list(util.post_backward_hooks),
            type(get_accelerator()).Event,
            vars(get_accelerator()).get("current_device"),
        ]

    before = state()
    _fit(zero_plus(3, compile=EAGER), Module())
    return [a == b for a, b in zip(before, state(), strict=True)]


def test_what_it_changes_in_the_process_is_undone(ranks2: Any) -> None:
    for unchanged in ranks2.run(_process_state):
        assert all(unchanged), unchanged


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_names(stage: int) -> None:
    strategy = pl.Trainer(
        strategy=f"zeroplus_stage{stage}_compile", accelerator="cpu", devices=1, logger=False
    ).strategy
    assert isinstance(strategy, zp.ZeroPlusStrategy)
    assert (strategy.stage, strategy.compile_options is not None) == (stage, True)


@pytest.mark.parametrize(
    ("stage", "argument", "message"),
    [
        (0, True, "stage 1, 2 or 3, not 0"),
        (2, "inductor", "`compile='inductor'`"),
        (2, {"mode": "max-autotune"}, "`backend`, `schedule` and `dynamic`"),
        (2, {"backend": "onnx"}, "not 'onnx'"),
        (2, {"dynamic": 3}, "not 3"),
        (3, {"schedule": [(1, ["zero3_compile"])]}, "beginning with step 0"),
        (3, {"schedule": ["zero3_compile"]}, "beginning with step 0"),
    ],
)
def test_refused_arguments(stage: int, argument: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException) as error:
        zp.ZeroPlusStrategy(stage=stage, compile=argument)
    assert message in str(error.value)


def test_another_backend_is_refused() -> None:
    run = pl.Trainer(strategy="zeroplus_stage2", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(MisconfigurationException, match="aot_eager"):
        run.fit(torch.compile(Classifier(), backend="aot_eager"), loader())


def test_regions() -> None:
    module = nn.Module()
    module.layers = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])
    module.loss = nn.CrossEntropyLoss()
    module.head = nn.Linear(2, 2)
    assert list(regions(module)) == [module.layers[0], module.layers[1], module.head]


def _monitored(stage: int) -> tuple[str, int]:
    monitor = zp.ReductionMonitor()
    printed = io.StringIO()
    with redirect_stdout(printed):
        run = trainer(zero_plus(stage, compile=EAGER), max_steps=2, callbacks=[monitor])
        run.fit(Module(), loader())
    return printed.getvalue(), len(monitor.history)


def test_the_monitor_names_what_ran_in_python(ranks2: Any) -> None:
    (printed, steps), (other, _) = ranks2.run(_monitored, 3)
    assert steps == 2 and "Dynamo" not in other
    table = printed[printed.index("Modules that ran in Python") :]
    assert "net.a" in table and "graph_break" in table and " kB" in table
    assert "Dynamo" not in ranks2.run(_monitored, 2)[0][0]  # nothing is gathered there


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class _Deep(Module):
    """More modules of a class than Dynamo compiles of one, in several shapes."""

    def build(self) -> None:
        torch.manual_seed(0)
        self.net = nn.ModuleList([*(_Block(4 + index) for index in range(9)), nn.Linear(8, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.net:
            x = block(x)
        return x


def _deep(stage: int, dynamic: bool | None) -> tuple[float, int, int]:
    torch._dynamo.utils.counters.clear()
    ours = _Deep()
    with brief_profiles():
        options = {**EAGER, "dynamic": dynamic, "schedule": [(0, [f"zero{stage}_compile"])]}
        run = trainer(zero_plus(stage, compile=options), max_epochs=1)
        run.fit(ours, loader(), loader(64))
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    others = _Deep()
    trainer("ddp", max_epochs=1).fit(others, loader(), loader(64))
    return relative_error(weights(ours), weights(others)), compiled, torch._dynamo.utils.counters["frames"]["total"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dynamic"),
    [
        (2, None),
        pytest.param(3, True, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.thorough),
        pytest.param(3, None, marks=pytest.mark.thorough),
    ],
)
def test_all_modules_of_a_class_are_compiled(ranks2: Any, stage: int, dynamic: bool | None) -> None:
    for error, compiled, frames in ranks2.run(_deep, stage, dynamic):
        assert error <= 1e-6
        assert compiled == frames >= 2 * 10, "each in training and in evaluation"


class _WithHead(Manual):
    """A skipped frame and a compiled one."""

    def build(self) -> None:
        super().build()
        self.head = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))


class _Hooked(_WithHead):
    """Every gradient is halved, by hooks that know no None."""

    def build(self) -> None:
        super().build()
        self.calls = 0
        for param in self.parameters():
            param.register_hook(self.halve)

    def halve(self, grad: Tensor) -> Tensor:
        self.calls += 1
        return grad * 0.5


def _hooked(stage: int) -> tuple[float, int, int]:
    ours, ddps = _Hooked(), _Hooked()
    found, _ = _fit(zero_plus(stage, compile=EAGER), ours)
    wanted, _ = _fit("ddp", ddps)
    assert all(ours.halve in (param._backward_hooks or {}).values() for param in ours.parameters())  # as they were
    return relative_error(found, wanted), ours.calls, ddps.calls


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_hooks_of_parameters_get_each_gradient_once(ranks2: Any, stage: int) -> None:
    for error, calls, expected in ranks2.run(_hooked, stage):
        assert error <= 1e-6 and calls == expected == 10 * 2 * BATCHES


def _audited(stage: int, lose: bool) -> tuple[str | None, list[tuple[int, bool]]]:
    auditor = zp.GradientAudit(steps=3)
    grads = itertools.count(1)

    def lose_one(grad: Tensor, param: nn.Parameter) -> Tensor:
        return torch.zeros_like(grad) if next(grads) == 5 else normalized(grad, param)

    with patch("lightning_zeroplus.engine.hooks.received.normalized", lose_one) if lose else nullcontext():
        try:
            trainer(zero_plus(stage, compile=EAGER), max_steps=3, callbacks=[auditor]).fit(_WithHead(), loader())
        except GradientMismatchError as error:
            return str(error), []
    return None, [(result.backwards[1], result.passed) for result in auditor.results]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_the_audit_sees_the_gradients_of_compiled_graphs(ranks2: Any, stage: int) -> None:
    for error, results in ranks2.run(_audited, stage, False):
        assert error is None and results == 3 * 10 * [(2, True)]
    for error, _ in ranks2.run(_audited, stage, True):
        assert error is not None and "1 of 10 parameters differ" in error
