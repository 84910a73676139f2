"""ReductionMonitor: its numbers against counts made here from the sizes of the parameters."""

from __future__ import annotations

import contextlib
import csv
import io
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import lightning_zeroplus as zp
from lightning_zeroplus.callbacks import reduction_monitor
from lightning_zeroplus.callbacks.reduction_monitor import ReductionMonitor
from lightning_zeroplus.callbacks.traffic import ReductionTraffic, StepTraffic
from tests.support.training import BATCHES, Classifier, ManualClassifier, fit, loader, trainer

#: Elements of a reduction bucket: the parameters below fill three.
BUCKET = 2500


class _Deep(Classifier):
    def build(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), *[nn.Linear(32, 32) for _ in range(6)], nn.Linear(32, 4))


class _Manual(_Deep, ManualClassifier):
    """Each ``training_step`` does one optimizer step per entry, after that many backwards."""

    backwards: tuple[int, ...] = (4,)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for backwards in self.backwards:
            for _ in range(backwards):
                loss = self.loss(batch)
                self.log("train_loss", loss)
                self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()


class _ThreeSteps(_Manual):
    backwards = (1, 2, 0)


#: Elements of the parameters, in the order in which a backward finishes them.
SIZES = [param.numel() for param in reversed(list(_Deep().parameters()))]
BYTES = 4 * sum(SIZES)


def _buckets() -> int:
    """How many buckets one backward fills."""
    buckets, elements = 1, 0
    for size in SIZES:
        if elements + size > BUCKET:
            buckets, elements = buckets + 1, 0
        elements += size
    return buckets


def _strategy(stage: int) -> zp.ZeroPlusStrategy:
    config = {"zero_optimization": {"reduce_bucket_size": BUCKET}}
    return zp.ZeroPlusStrategy(stage, reduction="backward" if stage >= 2 else "step", config=config)


def _fit(stage: int, module: Classifier, *callbacks: Any, **kwargs: Any) -> str:
    """Fit for an epoch and return what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        fit(_strategy(stage), module, callbacks=list(callbacks), **({"max_epochs": 1} | kwargs))
    return out.getvalue()


def _history(stage: int, module: type[Classifier], kwargs: dict[str, Any]) -> list[tuple[Any, ...]]:
    monitor = ReductionMonitor()
    _fit(stage, module(), monitor, **kwargs)
    return [tuple(traffic) for traffic in monitor.history]


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("module", "backwards"), [(_Deep, 1), (_Manual, 4)])
def test_counts(ranks2: Any, stage: int, module: type[Classifier], backwards: int) -> None:
    """Stages 0 (in one bucket) and 1 hold the gradients and reduce once per step, 2 and 3 in every backward."""
    assert _buckets() == 3
    reductions = backwards if stage >= 2 else 1
    presence = 0 if stage else 4 * len(SIZES)  # which parameters have a gradient goes along
    collectives = reductions * (_buckets() if stage else 1)
    held = 0 if stage >= 2 else BYTES
    for history in ranks2.run(_history, stage, module, {}):
        assert [step for step, *_ in history] == list(range(BATCHES))
        assert {(row[1], row[2], row[4]) for row in history} == {(collectives, reductions * BYTES + presence, held)}
        assert all(0 < seconds < 10 for _, _, _, seconds, _ in history)


@pytest.mark.parametrize(
    ("module", "kwargs", "backwards"),
    [(_Deep, {"accumulate_grad_batches": 3}, [3, 1]), (_ThreeSteps, {}, [1, 2, 0] * BATCHES)],
)
def test_a_step_is_not_a_batch(ranks2: Any, module: type[Classifier], kwargs: Any, backwards: list[int]) -> None:
    expected = [(step, count * _buckets(), count * BYTES) for step, count in enumerate(backwards)]
    for history in ranks2.run(_history, 2, module, kwargs):
        assert [traffic[:3] for traffic in history] == expected


def _backend_attributes() -> set[str]:
    from deepspeed.comm import comm

    return set(vars(comm.cdb))


def _clean_up(raises: bool) -> tuple[set[str], set[str], int]:
    _fit(2, _Deep())  # so that there is a backend
    before, during, monitor = _backend_attributes(), set(), ReductionMonitor()

    def look(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        during.update(_backend_attributes())
        if raises and batch_idx == 2:
            raise KeyError("on purpose")

    _fit(2, _Deep(), monitor)
    with contextlib.suppress(KeyError):
        _fit(2, _Deep(), monitor, LambdaCallback(on_train_batch_end=look))
    return during - before, before ^ _backend_attributes(), len(monitor.history)


@pytest.mark.parametrize(("raises", "steps"), [(False, BATCHES), (True, 3)])
def test_nothing_outlives_the_fit(ranks2: Any, raises: bool, steps: int) -> None:
    for added, left, counted in ranks2.run(_clean_up, raises):
        assert {"all_reduce", "reduce_scatter_tensor"} <= added
        assert not left
        assert counted == steps, "of the last fit"


def _with_ddp() -> tuple[list[str], int, str]:
    monitor, out = ReductionMonitor(), io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(out):
        warnings.simplefilter("always")
        fit("ddp", callbacks=[monitor], max_epochs=2)
    with pytest.raises(ValueError, match="no optimizer step has been counted"):
        monitor.plot()
    messages = (str(warning.message) for warning in caught)
    return [text for text in messages if "ReductionMonitor" in text], len(monitor.history), out.getvalue()


def test_other_strategies_are_warned_of(ranks2: Any) -> None:
    warning = "`ReductionMonitor` counts nothing with `DDPStrategy`: it needs a `ZeroPlusStrategy`."
    assert ranks2.run(_with_ddp) == [([warning], 0, ""), ([], 0, "")]


def _reported(directory: str) -> tuple[list[float], list[tuple[float, ...]]]:
    monitor, logger = ReductionMonitor(), CSVLogger(directory, name="", version="")
    options = {"callbacks": [monitor, TQDMProgressBar(refresh_rate=0)], "enable_progress_bar": True, "logger": logger}
    run = trainer(_strategy(2), log_every_n_steps=3, **options)
    with contextlib.redirect_stdout(io.StringIO()):
        run.fit(_Manual(), loader())
    shown = [run.progress_bar_metrics[name] for name in ("reductions", "reduced_MB", "reduce_ms", "held_MB")]
    return shown, [tuple(traffic) for traffic in monitor.history]


def test_loggers_and_progress_bar(ranks2: Any, tmp_path: Path) -> None:
    outcomes = ranks2.run(_reported, str(tmp_path))
    for shown, history in outcomes:
        _, collectives, size, seconds, held = history[-1]
        assert shown == [collectives, size / 1e6, seconds * 1e3, held / 1e6]
    with open(tmp_path / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    names = ("step", *(f"reduction/{name}" for name in ("collectives", "bytes", "seconds", "held_bytes")))
    logged = [tuple(float(row[name]) for name in names) for row in rows if row["reduction/bytes"]]
    assert logged == outcomes[0][1][2::3], "every third step of rank 0"
    assert [row["step"] for row in rows if row["train_loss"]] == [str(int(step)) for step, *_ in logged]


def _printed(with_rich: bool) -> tuple[str, list[int]]:
    monitor, hidden = ReductionMonitor(), {} if with_rich else {"rich.console": None}
    with patch.dict(sys.modules, hidden), patch.object(reduction_monitor, "_MAX_HISTORY", 3):
        out = _fit(2, _ThreeSteps(), monitor, limit_train_batches=3)
    return out, [traffic.step for traffic in monitor.history]


@pytest.mark.parametrize("with_rich", [True, False])
def test_summary_of_rank_0_and_bounded_history(ranks2: Any, with_rich: bool) -> None:
    """Nine steps with 3, 6 and 0 reductions in turn, of which every fourth is kept."""
    (printed, kept), (silent, kept_by_other) = ranks2.run(_printed, with_rich)
    assert kept == kept_by_other == [0, 4, 8]
    assert silent == ""
    assert "Gradient reductions of rank 0 in 9 optimizer steps" in printed
    lines = [line.replace("│", " ").replace("┃", " ").split() for line in printed.splitlines()]
    assert ["per", "optimizer", "step", "mean", "median", "max", "total"] in lines
    assert ["gradient", "reductions", "3", "3", "6", "27"] in lines
    sizes = [f"{BYTES / 1e3 * factor:.3f}".rstrip("0").rstrip(".") for factor in (1, 1, 2, 9)]
    assert ["bytes", "reduced", *(word for size in sizes for word in (size, "kB"))] in lines


def _plotted(path: str) -> tuple[list[list[float]], list[str]]:
    monitor = ReductionMonitor()
    _fit(2, _Manual(), monitor)
    figure = monitor.plot(f"{path}-{torch.distributed.get_rank()}.png")
    without = patch.dict(sys.modules, {"matplotlib.figure": None})
    with without, pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        monitor.plot()
    return [list(map(float, axis.lines[0].get_ydata())) for axis in figure.axes], [a.get_ylabel() for a in figure.axes]


def test_plot(ranks2: Any, tmp_path: Path) -> None:
    for rank, (lines, labels) in enumerate(ranks2.run(_plotted, str(tmp_path / "plot"))):
        assert lines[0] == [4 * _buckets()] * BATCHES
        assert lines[1] == pytest.approx([4 * BYTES / 1e3] * BATCHES)
        assert labels[:2] == ["gradient reductions", "bytes reduced\n[kB]"] and len(labels) == 4
        assert (tmp_path / f"plot-{rank}.png").read_bytes().startswith(b"\x89PNG")


class _Backend:
    def all_reduce(self, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        return SimpleNamespace(wait=time.sleep) if async_op else None

    all_reduce_coalesced = reduce = reduce_scatter = reduce_scatter_tensor = all_to_all_single = all_reduce


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.comm import comm

    monkeypatch.setattr(comm, "cdb", _Backend())
    return comm.cdb


def _counter(updating: bool = False, fetches: bool = False) -> tuple[Any, ReductionTraffic]:
    zero = SimpleNamespace(use_all_reduce_for_fetch_params=fetches)
    engine = SimpleNamespace(updating=updating, steps=0, held=0, _config=SimpleNamespace(zero_config=zero))
    engine.gradient_accumulation = SimpleNamespace(held_bytes=lambda: engine.held)
    return engine, ReductionTraffic(engine, lambda: engine.steps)


WIDE, NARROW, ONE_BYTE = torch.zeros(10), torch.zeros(6, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.int8)


@pytest.mark.parametrize(
    ("settings", "method", "args", "kwargs", "counted"),
    [
        ({}, "all_reduce", (WIDE, "op", "group", False), {}, (1, 40)),
        ({}, "all_reduce", (), {"tensor": NARROW}, (1, 12)),
        ({}, "all_reduce_coalesced", ([WIDE, WIDE],), {}, (1, 80)),
        ({}, "reduce", (NARROW, 0), {}, (1, 12)),
        ({}, "reduce_scatter", (NARROW, [WIDE, WIDE, WIDE]), {}, (1, 120)),
        ({}, "reduce_scatter_tensor", (), {"output_tensor": NARROW, "input_tensor": WIDE}, (1, 40)),
        ({}, "all_reduce", (torch.zeros(2, dtype=torch.int64),), {}, (0, 0)),
        ({"updating": True}, "all_reduce", (WIDE,), {}, (0, 0)),
        ({"fetches": True}, "all_reduce", (WIDE,), {}, (0, 0)),
        ({}, "all_to_all_single", (NARROW, ONE_BYTE), {}, (0, 0)),
    ],
)
def test_what_is_counted(backend: Any, settings: Any, method: str, args: Any, kwargs: Any, counted: Any) -> None:
    engine, traffic = _counter(**settings)
    with traffic:
        with pytest.raises(ValueError, match="use one `ReductionMonitor` per Trainer"):
            traffic.install()
        getattr(backend, method)(*args, **kwargs)
        engine.steps = 1
        traffic.observe()
    assert [step[1:3] for step in traffic.drain_finished_steps()] == [counted]
    assert vars(backend) == {}


def test_peak_of_held_bytes_and_time_in_wait(backend: Any) -> None:
    engine, traffic = _counter()
    with traffic:
        for engine.held in (100, 300, 200):
            backend.all_reduce(WIDE, async_op=True).wait(0.01)
        engine.steps, engine.held = 1, 50
        traffic.observe()
        engine.steps, engine.held = 2, 0
        traffic.observe()
    first, second = traffic.drain_finished_steps()
    assert (first.held_bytes, second.held_bytes) == (300, 50)
    assert 0.03 <= first.seconds < 1 and second.seconds == 0


def test_on_a_device_a_step_waits_for_its_events(backend: Any) -> None:
    engine, traffic = _counter()
    event = Mock(**{"query.return_value": False, "elapsed_time.return_value": 250.0})
    gradient = SimpleNamespace(is_cuda=True, nbytes=8, is_floating_point=lambda: True)
    with traffic, patch("torch.cuda.Event", return_value=event):
        backend.all_reduce_coalesced([gradient])
        engine.steps = 1
        traffic.observe()
    assert traffic.drain_finished_steps() == [] and not event.synchronize.called
    assert traffic.drain_finished_steps(wait=True) == [
        StepTraffic(step=0, collectives=1, bytes=8, seconds=0.25, held_bytes=0)
    ]
