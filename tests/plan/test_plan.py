"""`plan` without ranks: what it counts of a module, what it recommends, what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import nn

import lightning_zeroplus as zp
from lightning_zeroplus.cli import main
from lightning_zeroplus.plan import Collective, Estimate, Job, Link, Settings, best, describe, plan, settings_of
from lightning_zeroplus.plan.optimizers import Need, OptimizersOnMeta
from lightning_zeroplus.plan.report import parse_bytes, parse_rate, parse_time, show_bytes, show_seconds

ROOT = Path(__file__).parents[2]
NUMEL = 1000


def _need(make: Any) -> Need:
    param = nn.Parameter(torch.empty(4, device="meta"))
    return OptimizersOnMeta([make([param])]).need(0, [((NUMEL,), torch.float32)])


@pytest.mark.parametrize(
    ("make", "states", "working"),
    [
        (lambda p: torch.optim.SGD(p, lr=1), 0, 0),
        (lambda p: torch.optim.SGD(p, lr=1, momentum=0.9), 1, 0),
        (lambda p: torch.optim.SGD(p, lr=1, weight_decay=0.1), 0, 1),
        (lambda p: torch.optim.AdamW(p), 2, 1),
        (lambda p: torch.optim.AdamW(p, foreach=False), 2, 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3, 1),
        (lambda p: torch.optim.Adagrad(p), 1, 2),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), 3, 1),
    ],
)
def test_states_and_temporaries_are_those_of_a_step(make: Any, states: int, working: int) -> None:
    assert _need(make) == (states * 4 * NUMEL, working * 4 * NUMEL)


def test_a_step_that_needs_values_is_refused_by_name() -> None:
    class Asks(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            float(self.param_groups[0]["params"][0].detach().sum())

    with pytest.raises(ValueError, match=r"`Asks` cannot be run on the meta device.*--optimizer torch.optim.AdamW"):
        _need(lambda p: Asks(p, lr=1))


class _Net(nn.Module):
    def __init__(self, features: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(features, features) for _ in range(layers)])


def _model(precision: str = "32-true", optimizer: Any = torch.optim.AdamW, **kwargs: Any) -> Any:
    with torch.device("meta"):
        net = _Net(**kwargs)
    return describe(net, [optimizer(net.parameters(), lr=1e-3)], precision)


def _by_name(estimates: list[Estimate]) -> dict[str, Estimate]:
    return {each.strategy: each for each in estimates}


@pytest.mark.parametrize(
    ("precision", "weight", "master"), [("32-true", 4, 0), ("bf16-mixed", 4, 0), ("16-true", 2, 4)]
)
def test_the_shares_of_many_ranks(precision: str, weight: int, master: int) -> None:
    """Between two steps: weights everywhere but at stage 3, AdamW's states and the master weights nowhere whole."""
    ranks, model = 8, _model(precision)
    numel = sum(each.numel for each in model.weights)
    found = _by_name(plan(model, Job(ranks), Settings(config={"zero_optimization": {"reduce_bucket_size": 1}})))
    for stage in (1, 2):
        assert found[f"zeroplus_stage{stage}"].between == numel * weight + numel * (8 + master) // ranks
    offloaded = found["zeroplus_stage2_offload"]
    assert offloaded.between == numel * weight + 64 * 64 * weight
    assert offloaded.host > numel * (8 + master) // ranks
    assert found["zeroplus_fsdp"].between == numel * (12 if "true" not in precision or weight == 4 else 6) // ranks


def test_frozen_weights_are_neither_reduced_nor_stepped() -> None:
    with torch.device("meta"):
        net = _Net()
    for param in net.layers[:3].parameters():
        param.requires_grad = False
    model = describe(net, [torch.optim.AdamW(net.parameters())])
    trained = 64 * 64 + 64
    for name, each in _by_name(plan(model, Job(2))).items():
        presence = 8 * 4 if name == "zeroplus_stage0" else 0
        assert each.reduced == 4 * trained + presence, name


def test_many_ranks_and_parameters_take_no_time_and_reduce_every_element() -> None:
    model = _model("bf16-mixed", features=4096, layers=64)
    numel = sum(each.numel for each in model.weights)
    for each in plan(model, Job(4096, backwards=2)):
        assert each.reduced >= numel * 2 and each.peak > 0


def test_an_optimizer_of_whole_tensors_is_counted_as_spread() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model = describe(net, [torch.optim.Muon(net.parameters(), lr=1e-3)])
    found = _by_name(plan(model, Job(4)))
    assert found["zeroplus_stage1"].between == 2 * 64 * 64 * 4 + 2 * 64 * 64 * 4 // 4
    assert "`Muon` updates whole tensors" in found["zeroplus_stage1"].notes[0]
    assert not found["ddp"].notes


def _estimate(name: str, bytes_: int, payload: int, host: int = 0, overlaps: bool = True) -> Estimate:
    wire = (Collective("all_reduce", "gradients", 1, payload, overlaps),)
    return Estimate(name, False, 4, {"step": {"weights": bytes_}}, 0, host, wire)


def test_the_cheapest_that_fits_is_recommended() -> None:
    link = Link(1e3, 0.0)
    large, small = _estimate("large", 100, 10), _estimate("small", 50, 20)
    hidden, host = _estimate("shown", 50, 20, overlaps=False), _estimate("host", 10, 1, host=5)
    everything = [large, hidden, small, host]
    assert best(everything, 100, link) is large
    assert best(everything, 99, link) is small, "of two that send as much, the one that is hidden"
    assert best(everything, 100, link, activations=1) is small
    assert best(everything, 20, link) is host, "the host's memory comes last"
    assert best(everything, 9, link) is None


def test_the_time_on_the_wire() -> None:
    """A ring of n ranks sends 2 (n - 1) / n of an all-reduce, and half of that of the others."""
    link = Link(100.0, 0.5)
    assert link.seconds(Collective("all_reduce", "gradients", 2, 400, True), 4) == 2 * 0.5 + 600 / 100
    assert link.seconds(Collective("reduce_scatter", "gradients", 1, 400, True), 4) == 0.5 + 300 / 100
    assert link.seconds(Collective("all_gather", "weights", 1, 400, True), 1) == 0


def test_quantities() -> None:
    assert (parse_bytes("80GiB"), parse_bytes("80 GB"), parse_bytes(".5kB")) == (80 * 2**30, 80 * 10**9, 500)
    assert (parse_rate("400Gbit"), parse_rate("400Gbit/s"), parse_rate("50GB")) == (50e9, 50e9, 50e9)
    assert (parse_time("20us"), parse_time("0s")) == (pytest.approx(20e-6), 0)
    assert (show_bytes(80 * 2**30), show_bytes(1023), show_bytes(0)) == ("80 GiB", "1023 B", "")
    assert (show_seconds(0.0123), show_seconds(0)) == ("12.3 ms", "0")
    for wrong in ("80", "GiB", "-1GiB", "80Gib", "0GiB"):
        with pytest.raises(ValueError, match="such as 80GiB"):
            parse_bytes(wrong)


# -- settings -------------------------------------------------------------------------------------------------------


def test_the_settings_of_a_strategy_count() -> None:
    strategy = zp.ZeroPlusStrategy(2, reduction="step", accumulate_dtype="float32")
    settings = settings_of(strategy)
    assert settings.always_waits and settings.accumulate_dtype is torch.float32
    assert {each.window for each in plan(_model("bf16-mixed"), Job(2), settings) if "stage2" in each.strategy} == {True}
    assert not settings_of(zp.ZeroPlusStrategy(1)).always_waits, "there it costs nothing, and is the default"
    wrapped = settings_of(zp.ZeroPlusFSDPStrategy(wrap=nn.Linear, reduce_dtype=None))
    assert wrapped.wrap is nn.Linear and wrapped.reduce_dtype is None
    assert settings_of("ddp") == Settings()


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}, r"\['device'\]='nvme'"),
        ({"zero_hpz_partition_size": 8}, r"\['zero_hpz_partition_size'\]=8"),
    ],
)
def test_settings_that_are_not_counted_are_refused(zero: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(zp.ZeroPlusStrategy(3, config={"zero_optimization": zero}))


@pytest.mark.parametrize("setting", [{"replicate_size": 2}, {"reshard_after_forward": True}])
def test_settings_of_fsdp_that_are_not_counted_are_refused(setting: dict[str, Any]) -> None:
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"`{name}={value}` is not counted"):
        settings_of(zp.ZeroPlusFSDPStrategy(**setting))


def test_weights_that_stay_whole_are_gathered_once() -> None:
    with torch.device("meta"):
        net = _Net()
    gathered = []
    for reshard in (None, False):
        settings = settings_of(zp.ZeroPlusFSDPStrategy(wrap=nn.Linear, reshard_after_forward=reshard))
        optimizer = torch.optim.AdamW(net.parameters())
        model = describe(net, [optimizer], wrap=settings.wrap, reshard_after_forward=settings.reshard_after_forward)
        estimate = _by_name(plan(model, Job(2), settings))["zeroplus_fsdp"]
        gathered.append(sum(each.payload for each in estimate.collectives if each.of == "weights"))
    twice, once = gathered
    assert 0 < 2 * once == twice


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ValueError, match="`precision='transformer-engine'`.*bf16-mixed"):
        _model("transformer-engine")
    with pytest.raises(ValueError, match="`ranks=0`"):
        plan(_model(), Job(0))
    with pytest.raises(ValueError, match="nothing is trained"):
        describe(nn.ReLU(), [])


# -- the command ----------------------------------------------------------------------------------------------------


class Planned(pl.LightningModule):
    """A module of a config: a part of it comes in `configure_model`."""

    def __init__(self, features: int = 512, reads: bool = False) -> None:
        super().__init__()
        self.features, self.reads = features, reads
        self.first = nn.Linear(features, features)
        if reads:
            float(self.first.weight.detach().sum())

    def configure_model(self) -> None:
        self.second = nn.Linear(self.features, self.features)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(ROOT)

    def write(trainer: Any = None, **init_args: Any) -> str:
        path = tmp_path / "run.yaml"
        model = {"class_path": "tests.plan.test_plan.Planned", "init_args": init_args}
        many = {"accelerator": "gpu", "devices": 8, "num_nodes": 8, "strategy": "zeroplus_stage2"}
        path.write_text(yaml.safe_dump({"trainer": {**many, **(trainer or {})}, "model": model, "ckpt_path": None}))
        return str(path)

    return write


def test_the_command_prints_a_table_and_a_recommendation(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpus", "64", "--memory", "80GiB", "--wire", "400Gbit", "--latency", "5us"]
    assert main(["plan", "--config", config({"precision": "bf16-mixed"}), *options, "--backwards", "4"]) == 0
    printed = capsys.readouterr().out
    assert "525,312 parameters (525,312 trained) in bf16-mixed on 64 GPUs of 80 GiB" in printed
    for name in ("ddp", "stage0", "stage1", "stage2 window", "stage3 window", "stage3_offload", "fsdp window"):
        assert f"│ {name} " in printed
    assert "Take zeroplus_fsdp, with its backwards in `coalesce()`: of what fits it is cheapest" in printed
    assert "activations are not counted" in printed


def test_the_command_as_json_counts_what_lightning_accumulates(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = config({"accumulate_grad_batches": 4})
    assert main(["plan", "--config", path, "--gpus", "2", "--memory", "1GiB", "--activations", "1MiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["backwards"], found["accumulates"], found["parameters"]) == (4, True, 525_312)
    rows = {(row["strategy"], row["window"]): row for row in found["strategies"]}
    bytes_ = 4 * 525_312
    reduced = {
        key: sum(each["payload"] for each in row["collectives"] if each["of"] == "gradients")
        for key, row in rows.items()
    }
    assert reduced["ddp", False] == bytes_, "DDP reduces the last of the accumulated backwards only"
    assert reduced["zeroplus_stage2", False] == 4 * bytes_ and reduced["zeroplus_stage2", True] == bytes_
    assert sum(row["recommended"] for row in found["strategies"]) == 1
    assert rows["ddp", False]["bytes"] == sum(rows["ddp", False]["by_moment"]["backward"].values()) + 2**20


def test_nothing_fits(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", config(), "--gpus", "2", "--memory", "1MiB"]) == 1
    assert re.search(r"Nothing fits: \w+ needs the least, [\d.]+ MiB of 1 MiB", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "80"], "--memory '80': give a number and one of the units"),
        (["--wire", "fast"], "--wire 'fast'"),
        (["--latency", "3"], "--latency '3'"),
        (["--gpus", "0"], "--gpus 0: give a positive integer"),
        (["--backwards", "-1"], "--backwards -1: give a positive integer"),
    ],
)
def test_wrong_options_are_named(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "--gpus", "2", "--memory", "80GiB", *options])
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_a_module_that_reads_its_weights_is_built_on_the_cpu(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["plan", "--config", config(reads=True), "--gpus", "2", "--memory", "80GiB"]
    assert main(options) == 1
    said = capsys.readouterr().err
    assert "cannot be built on the meta device" in said and "`--device cpu`" in said
    assert main([*options, "--device", "cpu"]) == 0


def test_the_optimizer_of_the_command_line_counts(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["plan", "--config", config(), "--gpus", "2", "--memory", "80GiB", "--json"]
    assert main([*options, "--optimizer", "torch.optim.SGD", "--optimizer.lr", "0.1"]) == 0
    rows = json.loads(capsys.readouterr().out)["strategies"]
    assert all(not each["by_moment"]["step"].get("states") for each in rows)
