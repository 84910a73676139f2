"""The strategy's arguments and config: merged, checked, refused with the key named. No processes."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.plugins.precision.deepspeed import DeepSpeedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

import lightning_zeroplus as zp
from lightning_zeroplus.strategy.deepspeed.config import checks as config_checks
from lightning_zeroplus.strategy.deepspeed.config import settings as settings
from lightning_zeroplus.strategy.names import register_strategies

NAMES = [*(f"zeroplus_stage{stage}" for stage in range(4)), "zeroplus_stage2_offload", "zeroplus_stage3_offload"]


def test_names_are_registered_and_registering_again_changes_nothing() -> None:
    before = {name: dict(StrategyRegistry[name]) for name in NAMES}
    register_strategies()
    assert {name: dict(StrategyRegistry[name]) for name in NAMES} == before


@pytest.mark.parametrize("name", NAMES)
def test_the_trainer_accepts_the_name(name: str) -> None:
    strategy = pl.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False).strategy
    assert isinstance(strategy, zp.ZeroPlusStrategy)
    assert name == f"zeroplus_stage{strategy.stage}" + ("_offload" if "offload" in name else "")
    assert ("offload_optimizer" in strategy.config["zero_optimization"]) == ("offload" in name)


def test_few_arguments() -> None:
    assert len(inspect.signature(zp.ZeroPlusStrategy).parameters) <= 14


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"])
def test_precision_alone_chooses_our_plugin(precision: Any) -> None:
    trainer = pl.Trainer(strategy="zeroplus_stage2", accelerator="cpu", devices=1, precision=precision, logger=False)
    assert isinstance(trainer.precision_plugin, zp.ZeroPlusPrecision)
    assert trainer.precision_plugin is trainer.strategy.precision_plugin
    assert trainer.precision_plugin.precision == precision


def test_a_plain_deepspeed_precision_is_replaced() -> None:
    plugin = zp.ZeroPlusStrategy(precision_plugin=DeepSpeedPrecision("bf16-true")).precision_plugin
    assert isinstance(plugin, zp.ZeroPlusPrecision) and plugin.precision == "bf16-true"


_KEYS = st.sampled_from("abc")
_VALUES = st.recursive(st.integers(0, 3), lambda inner: st.dictionaries(_KEYS, inner, max_size=3), max_leaves=6)
_SECTIONS = st.dictionaries(_KEYS, _VALUES, max_size=3)


@given(_SECTIONS, _SECTIONS)
def test_merge_is_deep_and_the_user_wins(defaults: dict[str, Any], user: dict[str, Any]) -> None:
    def check(default: Any, mine: Any, merged: Any) -> None:
        if not (isinstance(default, dict) and isinstance(mine, dict)):
            assert merged == mine
            return
        assert set(merged) == set(default) | set(mine)
        for key in merged:
            if key in mine:
                check(default.get(key), mine[key], merged[key])
            else:
                assert merged[key] == default[key]

    check(defaults, user, settings.merge(defaults, user))


def test_config_from_dict_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"zero_optimization": {"stage": 2, "overlap_comm": True}, "steps_per_print": 7}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    monkeypatch.delenv(zp.ZeroPlusStrategy.DEEPSPEED_ENV_VAR, raising=False)
    given_as = [zp.ZeroPlusStrategy(config=config), zp.ZeroPlusStrategy(config=path)]
    monkeypatch.setenv(zp.ZeroPlusStrategy.DEEPSPEED_ENV_VAR, str(path))
    given_as.append(zp.ZeroPlusStrategy())
    for strategy in given_as:
        assert strategy.stage == 2
        assert strategy.config["steps_per_print"] == 7
        assert strategy.config["zero_optimization"] == {
            "stage": 2,
            "overlap_comm": True,  # the user's
            "contiguous_gradients": True,  # the default
        }


def test_defaults_by_device() -> None:
    strategy = zp.ZeroPlusStrategy(stage=3, config={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    on_cpu, on_gpu = (settings.completed(strategy.config, "32-true", device) for device in ("cpu", "cuda"))
    assert on_cpu["zero_optimization"]["overlap_comm"] is False
    assert on_cpu["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert on_gpu["zero_optimization"]["overlap_comm"] is True
    assert on_gpu["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "offload_param" not in on_gpu["zero_optimization"]
    mine = {
        "stage": 3,
        "overlap_comm": False,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": None,
    }
    theirs = settings.completed({**strategy.config, "zero_optimization": mine}, "32-true", "cuda")
    assert theirs["zero_optimization"] == mine


@pytest.mark.parametrize(
    ("stage", "device", "width", "buckets"),
    [
        (2, "cuda", 4096, 4),  # a bucket is full while the backward still runs
        (3, "cuda", 4096, 4),
        (3, "cuda", 2**14, 16),
        (3, "cuda", 512, 1),  # a collective would cost more than it hides
        (1, "cuda", 4096, 1),  # hooks do not reduce
        (3, "cpu", 4096, 1),  # nothing overlaps
    ],
)
def test_buckets_are_small_enough_to_overlap(stage: int, device: str, width: int, buckets: int) -> None:
    module = nn.Linear(width, width, bias=False, device="meta")
    config = settings.completed(zp.ZeroPlusStrategy(stage=stage).config, "32-true", device)
    size = settings.with_sizes(config, module, True)["zero_optimization"]["reduce_bucket_size"]
    assert -(-module.weight.numel() // size) == buckets
    given = settings.merge(config, {"zero_optimization": {"reduce_bucket_size": 7}})
    assert settings.with_sizes(given, module, True)["zero_optimization"]["reduce_bucket_size"] == 7


@pytest.mark.parametrize(
    ("width", "zero", "keeps_whole", "threshold"),
    [
        (400, {}, True, 160_000),
        (4, {}, True, 100_000),  # DeepSpeed's default
        (4100, {}, True, None),
        (400, {}, False, None),
        (400, {"stage": 2}, True, None),
        (400, {"offload_param": {"device": "cpu"}}, True, None),
        (400, {"offload_optimizer": {"device": "cpu"}}, True, None),
        (400, {"stage3_param_persistence_threshold": 5}, True, 5),
    ],
)
def test_small_modules_stay_whole(width: int, zero: dict[str, Any], keeps_whole: bool, threshold: int | None) -> None:
    module = nn.Linear(width, width, bias=False, device="meta").requires_grad_(False)
    config = settings.with_sizes({"zero_optimization": {"stage": 3, **zero}}, module, keeps_whole)
    assert config["zero_optimization"].get("stage3_param_persistence_threshold") == threshold


def test_the_users_dict_is_not_changed() -> None:
    config: dict[str, Any] = {"zero_optimization": {}}
    zp.ZeroPlusStrategy(stage=1, config=config)
    assert config == {"zero_optimization": {}}


def test_clipping_is_off_unless_asked_for() -> None:
    """DeepSpeed's own default clips at 1.0."""
    assert zp.ZeroPlusStrategy().config["gradient_clipping"] == 0.0


_LOW: dict[str, Any] = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
_OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("section", "keys", "zero", "precision", "message"),
    [
        ("bf16", {"bf16_optimizer_states": True}, {"stage": 2}, "bf16-true", r"states'\]=True` needs .*grads'\]=True`"),
        ("bf16", _LOW, {"stage": 0}, "bf16-true", "is supported at ZeRO stages 1 to 3"),
        ("bf16", _LOW, {"stage": 1}, "32-true", r"contradicts `Trainer\(precision='32-true'\)`"),
        (
            "bf16",
            {"bf16_master_weights_and_grads": True},
            {"stage": 3},
            "bf16-true",
            "optimizer_states'.=True` too, or",
        ),
        ("fp16", {"fp16_master_weights_and_grads": True}, {"stage": 1}, "16-true", 'fp32, which .*Set `offload="cpu"`'),
        ("bf16", _LOW, _OFFLOADED, "bf16-true", r"DeepSpeedCPUAdam\(..., fp32_.*=False\)`, and not this `AdamW`"),
    ],
)
def test_masters_of_16_bits_are_refused_by_name(
    section: str, keys: dict[str, Any], zero: dict[str, Any], precision: str, message: str
) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    with pytest.raises(MisconfigurationException, match=message):
        config_checks.check_masters({section: keys, "zero_optimization": zero}, precision, optimizer)


def test_masters_of_16_bits_are_accepted_where_deepspeed_keeps_them() -> None:
    for zero in ({"stage": 1}, {"stage": 3}, _OFFLOADED):
        config_checks.check_masters({"bf16": _LOW, "zero_optimization": zero}, "bf16-true")
    off = {"fp16": dict.fromkeys(("fp16_master_weights_and_grads",), False), "zero_optimization": {"stage": 1}}
    config_checks.check_masters(off, "32-true", torch.optim.SGD([nn.Parameter(torch.ones(1))]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 4}, "`stage` must be 0, 1, 2 or 3, not 4"),
        ({"stage": 2, "config": {"zero_optimization": {"stage": 3}}}, "`stage=2` contradicts"),
        ({"config": {"zero_optimization": {"mics_shard_size": 2}}}, r"\['mics_shard_size'\]=2` is not supported"),
        ({"config": {"zero_optimization": {"zero_quantized_gradients": True}}}, "windows reduce unquantized gradients"),
        ({"config": {"zero_optimization": {"zero_quantized_weights": True}}}, "other weights than under DDP"),
        ({"config": {"zero_optimization": {"compute_grad_norm": False}}}, r"grad_norm\(\)` and the check"),
        ({"config": {"activation_checkpointing": {"contiguous_memory_optimization": True}}}, "model parallelism"),
        ({"config": {"nebula": {"enabled": True}}}, "strategy writes checkpoints itself"),
        ({"config": {"sparse_gradients": True}}, "reduced as dense ones"),
        ({"config": {"compression_training": {"weight_quantization": {}}}}, "weights and activations"),
        ({"config": {"optimizer": {"type": "Muon"}}}, "needs whole gradients"),
        (
            {"config": {"zeroplus": {"bucket_buffers": 1}}},
            r"\['bucket_buffers'\]` must be an integer from 2 to 8, not 1",
        ),
        ({"config": {"zeroplus": {"buffers": 2}}}, "must be a section like"),
        ({"reduction": "never"}, "`reduction` must be .* not 'never'"),
        ({"offload": "disk"}, "`offload` must be None or \"cpu\", not 'disk'"),
        ({"stage": 0, "offload": "cpu"}, "needs ZeRO stage 1, 2 or 3"),
        (
            {"offload": "cpu", "config": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}},
            "contradicts .*offload_optimizer.*nvme",
        ),
        ({"config": {"gradient_acumulation_dtype": 1}}, "'gradient_acumulation_dtype'.* is not a DeepSpeed setting"),
        ({"config": {"zero_optimisation": {}}}, "Did you mean 'zero_optimization'"),
        ({"config": {"gradient_accumulation_steps": 4}}, "accumulate_grad_batches"),
        ({"config": {"train_batch_size": 4}}, "'train_batch_size'"),
        ({"config": {"compile": {"deepcompile": True}}}, r"'compile'.*ZeroPlusStrategy\(compile="),
        ({"config": {"zero_optimization": True}}, "must be a section"),
        ({"config": "missing.json"}, "'missing.json' .* cannot be read"),
    ],
)
def test_wrong_settings_are_refused_with_their_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        zp.ZeroPlusStrategy(**arguments)


def test_what_is_off_may_stay() -> None:
    off = {"enabled": False}
    zp.ZeroPlusStrategy(config={"sparse_gradients": False, "nebula": off, "elasticity": off})


def test_a_pass_by_itself_is_a_list_of_one() -> None:
    compiled = zp.ZeroPlusStrategy(3, compile={"schedule": [(0, "zero3_compile"), (5, ["prefetch"])]})
    assert compiled.compile_options is not None
    assert compiled.compile_options.schedule == [(0, ["zero3_compile"]), (5, ["prefetch"])]


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[1]", "must be a JSON object, not list")])
def test_unreadable_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(MisconfigurationException, match=message):
        zp.ZeroPlusStrategy(config=path)


@pytest.mark.parametrize(
    ("config", "precision", "fails"),
    [
        ({}, "32-true", False),
        ({"bf16": {"enabled": True}}, "bf16-true", False),
        ({"fp16": {"loss_scale": 8}}, "16-mixed", False),
        ({"fp16": {"enabled": False}}, "bf16-mixed", False),
        ({"bf16": {"enabled": True}}, "32-true", True),
        ({"fp16": {"enabled": True}}, "bf16-true", True),
        ({"bf16": {"enabled": False}}, "bf16-true", True),
        ({"bf16": {"enabled": True}}, "bf16-mixed", True),
        ({"fp16": {"enabled": True}}, "16-mixed", True),
    ],
)
def test_precision_of_config_and_trainer_must_agree(config: dict[str, Any], precision: str, fails: bool) -> None:
    if not fails:
        config_checks.check_precision(config, precision)
        return
    with pytest.raises(MisconfigurationException, match="contradicts `Trainer") as caught:
        config_checks.check_precision(config, precision)
    ((section, settings),) = config.items()
    wish = {"fp16": 'Trainer(precision="16-true")', "bf16": 'Trainer(precision="bf16-true")'}[section]
    assert (wish in str(caught.value)) == settings["enabled"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, r"config\['torch_autocast'\].*Remove the section"),
        ({"bf16": {"check_grad_overflow": True}}, r"\['check_grad_overflow'\]=True.*Remove the key, or set.*bf16-true"),
    ],
)
def test_what_mixed_precision_cannot_honour(config: dict[str, Any], message: str, precision: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        config_checks.check_precision(config, precision)
    config_checks.check_precision(config, "32-true")


def test_mixed_precision_has_fp32_weights_and_the_loss_scale_of_torch() -> None:
    for precision in ("bf16-mixed", "16-mixed"):
        given = settings.completed({"zero_optimization": {"stage": 2}, "fp16": {"hysteresis": 2}}, precision, "cpu")
        assert "bf16" not in given
        assert given["fp16"] == {"enabled": False, "loss_scale_window": 2000, "hysteresis": 2, "min_loss_scale": 0}


def test_lbfgs_needs_fp32_weights_and_no_loss_scale() -> None:
    lbfgs = torch.optim.LBFGS([nn.Parameter(torch.ones(1))])
    for precision in ("32-true", "bf16-mixed"):
        config_checks.check_optimizer(lbfgs, 0, precision)
    for precision in ("bf16-true", "16-true", "16-mixed"):
        with pytest.raises(MisconfigurationException, match="fp32 weights and no loss scale"):
            config_checks.check_optimizer(lbfgs, 0, precision)


def test_two_clipping_limits_are_refused() -> None:
    config_checks.check_clipping({"gradient_clipping": 1.0}, 1.0)
    config_checks.check_clipping({"gradient_clipping": 1.0}, None)
    with pytest.raises(MisconfigurationException, match="gradient_clip_val=0.5"):
        config_checks.check_clipping({"gradient_clipping": 1.0}, 0.5)


def test_deepspeed_checks_the_zero_section() -> None:
    with pytest.raises(MisconfigurationException, match="overlap_com=True"):
        config_checks.check_sections({"zero_optimization": {"stage": 2, "overlap_com": True}})


_IMPORTED_EARLY = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.accelerator import get_accelerator
del os.environ["DS_ACCELERATOR"]
get_accelerator()._name = "cuda"
import lightning.pytorch as pl, lightning_zeroplus
from lightning_zeroplus.strategy.deepspeed.accelerator import select_deepspeed_accelerator
from lightning.pytorch.accelerators import CPUAccelerator
select_deepspeed_accelerator(CPUAccelerator())
"""
_VARIABLE_SET = """
import os
os.environ["DS_ACCELERATOR"] = "cuda"
import lightning_zeroplus
from lightning_zeroplus.strategy.deepspeed.accelerator import select_deepspeed_accelerator
from lightning.pytorch.accelerators import CPUAccelerator
select_deepspeed_accelerator(CPUAccelerator())
"""
_NOT_IMPORTED = """
import sys, lightning_zeroplus as zp
zp.ZeroPlusStrategy(stage=3, config={"zero_optimization": {"overlap_comm": True}})
assert "deepspeed" not in sys.modules, "importing DeepSpeed settles its accelerator"
"""


@pytest.mark.parametrize(
    ("program", "message"),
    [
        pytest.param(
            _IMPORTED_EARLY,
            "DeepSpeed was imported before the Trainer chose accelerator='cpu', and has picked 'cuda'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            _VARIABLE_SET,
            "DS_ACCELERATOR='cuda', but the Trainer uses accelerator='cpu'",
            marks=pytest.mark.slow,
        ),
        pytest.param(_NOT_IMPORTED, "", marks=pytest.mark.slow),
    ],
)
def test_deepspeed_gets_the_trainers_accelerator(program: str, message: str) -> None:
    """In processes of their own: DeepSpeed settles for an accelerator once. The CUDA one is a fake here."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) == (message == ""), done.stderr
    assert message in done.stderr
