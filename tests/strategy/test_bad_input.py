"""Arguments and configs that hypothesis makes up: the good are accepted, the bad refused by name, and at once."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_zeroplus as zp
from lightning_zeroplus.strategy.common.window import GradientWindow
from lightning_zeroplus.strategy.deepspeed.config.checks import KNOWN_KEYS, REFUSED_KEYS, check_sections
from lightning_zeroplus.testing import RankPool, StreamSanitizer
from tests.support.training import Classifier, loader

_REFUSALS = (ValueError, MisconfigurationException, TypeError)
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.floats(),
    st.text(max_size=6),
    st.binary(max_size=3),
    st.sampled_from(["cpu", "step", "gloo", "fp32", "inductor", "raise", "true", torch.float32, torch.int8, print]),
    st.just(timedelta(seconds=5)),
    st.just(timedelta(seconds=-5)),
)
_ANYTHING = st.one_of(
    _SCALARS, st.lists(_SCALARS, max_size=3), st.dictionaries(st.text(max_size=4), _SCALARS, max_size=2)
)
_SETTINGS = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(each) and value == each for each in values)


def _is_int(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_timeout(value: Any) -> bool:
    return value is None or (isinstance(value, timedelta) and value > timedelta(0))


def _is_compile(value: Any) -> bool:
    # Of what is made up here; tests/engine/compile has the dicts with a meaning.
    return value is None or isinstance(value, bool) or value == {}


#: For every public class: how to make it from one argument, and which values of the argument mean something.
ARGUMENTS: dict[str, tuple[Callable[..., Any], dict[str, Callable[[Any], bool]]]] = {
    "ZeroPlusStrategy": (
        zp.ZeroPlusStrategy,
        {
            "stage": _one_of(None, 0, 1, 2, 3),
            "reduction": _one_of("auto", "backward", "step"),
            "accumulate_dtype": lambda value: value is None or value in (torch.float32, "float32", "fp32"),
            "offload": _one_of(None, "cpu"),
            "compile": _is_compile,
            "config": lambda value: value is None or value == {},
            "save_frozen": lambda value: isinstance(value, bool),
            "save_async": lambda value: isinstance(value, bool),
            "process_group_backend": lambda value: value in (None, "gloo"),
            "timeout": _is_timeout,
        },
    ),
    "ZeroPlusFSDPStrategy": (
        zp.ZeroPlusFSDPStrategy,
        {
            "wrap": lambda value: value is None or value is print or _is_int(value, 1),
            "activation_checkpointing": lambda value: value is None or value is print,
            "reduction": _one_of("auto", "backward", "step"),
            "reduce_dtype": lambda value: value is None or value is torch.float32,
            "offload": _one_of(None, "cpu"),
            "shard_size": lambda value: value == "auto" or _is_int(value, 1),
            "replicate_size": lambda value: _is_int(value, 1),
            "tensor_parallel_size": lambda value: _is_int(value, 1),
            "save_distributed_checkpoint": lambda value: isinstance(value, bool),
            "save_frozen": lambda value: isinstance(value, bool),
            "save_async": lambda value: isinstance(value, bool),
            "weight_grads": lambda value: value is None,
            "process_group_backend": lambda value: value in (None, "gloo"),
            "timeout": _is_timeout,
        },
    ),
    "CachedLoss": (
        lambda **kwargs: zp.CachedLoss(**{"loss_fn": torch.mean, **kwargs}),
        {
            "loss_fn": lambda value: value is print or isinstance(value, torch.dtype) and callable(value),
            "chunk_size": lambda value: (
                value is None
                or _is_int(value, 1)
                or (isinstance(value, list) and len(value) > 0 and all(_is_int(each, 1) for each in value))
            ),
            "cross_rank": lambda value: isinstance(value, bool),
            "chunk_tokens": lambda value: (
                value is None
                or _is_int(value, 1)
                or (isinstance(value, list) and len(value) > 0 and all(_is_int(each, 1) for each in value))
            ),
        },
    ),
    "coalesce": (
        lambda **kwargs: GradientWindow(lambda: pytest.fail("opened")).coalesce(
            **{"backwards": None, "max_bytes": None, **kwargs}
        ),
        dict.fromkeys(("backwards", "max_bytes"), lambda value: value is None or _is_int(value, 1)),
    ),
    "WeightGradStore": (zp.WeightGradStore, {"max_bytes": lambda value: value is None or _is_int(value, 1)}),
    "RankPool": (
        lambda **kwargs: RankPool(**{"world_size": 1, **kwargs}),
        {
            "world_size": lambda value: _is_int(value, 1),
            "timeout": lambda value: _is_number(value) and 0 < value < 366 * 24 * 3600,
            "initializer": lambda value: value is None or value is print,
            "mp_context": lambda value: value is None,
        },
    ),
    "GradientAudit": (
        zp.GradientAudit,
        {
            "steps": lambda value: _is_int(value, 1),
            "tolerance": lambda value: value is None or (_is_number(value) and value >= 0),
            "parameters": lambda value: (
                isinstance(value, str)
                or (isinstance(value, list) and len(value) > 0 and all(isinstance(each, str) for each in value))
            ),
            "on_mismatch": _one_of("raise", "warn"),
        },
    ),
    "StreamSanitizer": (
        StreamSanitizer,
        {
            "lifetime": lambda value: isinstance(value, bool),
            "drop": lambda value: value is None or isinstance(value, str),
        },
    ),
    "ReductionMonitor": (zp.ReductionMonitor, {}),
}


@pytest.fixture(autouse=True)
def _nothing_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(zp.ZeroPlusStrategy.DEEPSPEED_ENV_VAR, raising=False)
    had_a_group = torch.distributed.is_initialized()
    yield
    assert os.listdir(tmp_path) == []
    assert torch.distributed.is_initialized() == had_a_group


@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name, (_, arguments) in ARGUMENTS.items() for argument in arguments]
)
@given(value=_ANYTHING)
@example(value=1.0)
@example(value=True)
@example(value=float("nan"))
@example(value=timedelta(0))
@example(value=30)
@_SETTINGS
def test_an_argument_is_accepted_or_refused_by_name(name: str, argument: str, value: Any) -> None:
    make, arguments = ARGUMENTS[name]
    if arguments[argument](value):
        make(**{argument: value})
        return
    with pytest.raises(_REFUSALS) as refusal:
        make(**{argument: value})
    message = str(refusal.value)
    assert argument in message, message
    # A dict is refused by its first wrong key, and a value within a list with the list.
    assert repr(value) in message or isinstance(value, dict) or str(value) in message, message


@pytest.mark.parametrize("name", ARGUMENTS)
@given(argument=st.text("abcdefgh_", min_size=5, max_size=9))
@_SETTINGS
def test_unknown_arguments_are_refused(name: str, argument: str) -> None:
    with pytest.raises(TypeError, match=argument):
        ARGUMENTS[name][0](**{argument: 1})


# -- configs ---------------------------------------------------------------------------------------------------------

_NUMBERS = st.one_of(st.integers(-2, 5), st.floats(-2, 5), st.booleans(), st.text(max_size=4), st.none())
#: What each setting must be, written down independently of the package.
CONFIG: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], bool]]] = {
    "gradient_clipping": (_NUMBERS, lambda v: type(v) in (int, float) and v >= 0),
    "gradient_predivide_factor": (_NUMBERS, lambda v: type(v) in (int, float) and v > 0),
    "steps_per_print": (_NUMBERS, lambda v: type(v) is int and v > 0),
    "train_micro_batch_size_per_gpu": (_NUMBERS, lambda v: type(v) is int and v > 0),
    "prescale_gradients": (_NUMBERS, lambda v: type(v) is bool),
    "wall_clock_breakdown": (_NUMBERS, lambda v: type(v) is bool),
    "zero_allow_untested_optimizer": (_NUMBERS, lambda v: type(v) is bool),
    "communication_data_type": (_NUMBERS | st.sampled_from(["fp32", "bf16", "FP16"]), lambda v: v in _DTYPES),
    **{
        section: (_NUMBERS | st.just({}), lambda v: v == {})
        for section in ("fp16", "bf16", "optimizer", "scheduler", "zero_optimization", "data_types", "tensorboard")
    },
}
_DTYPES = (None, "fp32", "bf16", "FP16")


@given(st.dictionaries(st.sampled_from(sorted(CONFIG)), st.none(), min_size=1, max_size=3), st.data())
@_SETTINGS
def test_a_config_is_accepted_or_refused_by_its_key(keys: dict[str, None], data: st.DataObject) -> None:
    config = {key: data.draw(CONFIG[key][0], label=key) for key in keys}
    wrong = [key for key, value in config.items() if not CONFIG[key][1](value)]
    if not wrong:
        accepted = zp.ZeroPlusStrategy(config=config).config
        assert all(accepted[key] == value for key, value in config.items() if key != "zero_optimization")
        return
    with pytest.raises(MisconfigurationException) as refusal:
        zp.ZeroPlusStrategy(config=config)
    assert any(f"config['{key}']" in str(refusal.value) and repr(config[key]) in str(refusal.value) for key in wrong)


@given(st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=20))
@example("zero_optimisation")
@_SETTINGS
def test_an_unknown_key_is_refused(key: str) -> None:
    if key in KNOWN_KEYS or key in REFUSED_KEYS or key == "zeroplus":
        return
    with pytest.raises(MisconfigurationException, match=rf"config\['{key}'\]` is not a DeepSpeed setting"):
        zp.ZeroPlusStrategy(config={key: 1})


@pytest.mark.parametrize("key", sorted(REFUSED_KEYS))
def test_a_key_that_cannot_be_honoured_is_refused_with_the_remedy(key: str) -> None:
    with pytest.raises(MisconfigurationException) as refusal:
        zp.ZeroPlusStrategy(config={key: 1})
    assert f"config['{key}']" in str(refusal.value) and REFUSED_KEYS[key] in str(refusal.value)


@given(st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_SCALARS, inner, max_size=2)))
@_SETTINGS
def test_nothing_made_up_ends_in_another_error(config: Any) -> None:
    for given_as in (config, {"zero_optimization": config}, {"zero_optimization": {"offload_optimizer": config}}):
        with contextlib.suppress(MisconfigurationException, ValueError):
            zp.ZeroPlusStrategy(config=given_as, offload="cpu", accumulate_dtype=torch.float32)


@given(text=st.one_of(st.text(max_size=20), st.recursive(_NUMBERS, st.lists, max_leaves=3).map(json.dumps)))
@example(text='{"zero_optimization": {"stage": 1}}')
@_SETTINGS
def test_a_file_is_read_or_refused_with_its_name(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("config") / "ds.json"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    try:
        valid = isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except ValueError:
        valid = False
    if valid:
        assert zp.ZeroPlusStrategy(config=path).stage == 1
        return
    with pytest.raises(MisconfigurationException, match="ds.json"):
        zp.ZeroPlusStrategy(config=path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fp16": {"loss_scal": 1}}, r"config\['fp16'\]` is wrong: loss_scal=1"),
        ({"fp16": {"loss_scale": "x"}}, r"config\['fp16'\]` is wrong: loss_scale='x'"),
        ({"bf16": {"check_grad_overflow": 7}}, r"config\['bf16'\]` is wrong: check_grad_overflow=7"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}}, "reduce_bucket_size='big'"),
    ],
)
def test_sections_are_checked_before_the_process_group(config: dict[str, Any], message: str) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with pytest.raises(MisconfigurationException, match=message):
        check_sections(config)
    run = pl.Trainer(
        strategy=zp.ZeroPlusStrategy(config=config), accelerator="cpu", devices=1, logger=False,
        enable_checkpointing=False,
    )  # fmt: skip
    with pytest.raises(MisconfigurationException, match=message):
        run.fit(Classifier(), loader())


# -- names -----------------------------------------------------------------------------------------------------------


@given(st.text("abcdefgnopstz_0123456789", min_size=1, max_size=12))
@example("stage4")
@example("stage3_spawn")
@_SETTINGS
def test_a_name_that_is_not_registered_is_refused(suffix: str) -> None:
    name = f"zeroplus_{suffix}"
    if name in StrategyRegistry:
        return
    with pytest.raises(ValueError, match=name):
        pl.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False)


@given(st.text(max_size=8))
@_SETTINGS
def test_an_unknown_precision_is_refused(precision: str) -> None:
    if precision in ("32", "16", "bf16") or precision.endswith(("-true", "-mixed")):
        return
    with pytest.raises(ValueError, match="precision"):
        zp.ZeroPlusPrecision(precision)  # type: ignore[arg-type]
