"""What the comparison of programs must notice."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.programs.cell import Fate, judge
from tests.programs.comparison import BOUNDS, Result, differences, still
from tests.programs.program import STRATEGIES, Refusal, programs

_REFUSAL = Refusal("ValueError", "Use .* instead")


def _result() -> Result:
    return Result(
        state={"0.w": torch.tensor([1.0, 2.0]), "0.n": torch.tensor(3), "0.z": torch.tensor([1 + 2j])},
        trainable=["w"],
        start={"w": torch.tensor([0.0, 1.0])},
        kept={"out": torch.tensor(0.5)},
        logged=[[(0, {"loss": 1.0, "seconds": 4.0})]],
        metrics=[{"loss": 1.0}],
        steps=[4],
    )


def _change(attribute: str, key: Any, value: Any) -> Callable[[Result], None]:
    return lambda result: getattr(result, attribute).__setitem__(key, value)


_CHANGES: dict[str, Callable[[Result], None]] = {
    "weight": _change("state", "0.w", torch.tensor([1.0, 2.0001])),
    "nan": _change("state", "0.w", torch.tensor([1.0, torch.nan])),
    "shape": _change("state", "0.w", torch.zeros(0)),
    "dtype": _change("state", "0.w", torch.tensor([1.0, 2.0], dtype=torch.float64)),
    "integer": _change("state", "0.n", torch.tensor(4)),
    "imaginary part": _change("state", "0.z", torch.tensor([1 + 0j])),
    "one more": _change("state", "0.v", torch.zeros(1)),
    "result": _change("kept", "out", torch.tensor(0.6)),
    "logged": _change("logged", 0, [(0, {"loss": 1.1, "seconds": 4.0})]),
    "not logged": _change("logged", 0, [(0, {"seconds": 4.0})]),
    "logged once more": _change("logged", 0, [*_result().logged[0], (1, {"loss": 1.0})]),
    "metric": _change("metrics", 0, {"loss": 1.1}),
    "steps": _change("steps", 0, 5),
}


@pytest.mark.parametrize("name", _CHANGES)
def test_a_difference_is_noticed(name: str) -> None:
    want = _result()
    got = copy.deepcopy(want)
    assert not differences(got, want, BOUNDS["32"], False, ())
    _CHANGES[name](got)
    assert differences(got, want, BOUNDS["32"], False, ())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_metric_that_is_not_finite_is_compared(value: float) -> None:
    want = _result()
    want.metrics[0]["loss"] = value
    got = copy.deepcopy(want)
    assert not differences(got, want, BOUNDS["32"], False, ())
    for other in {1.0, math.inf, -math.inf} - {value}:
        got.metrics[0]["loss"] = other
        assert differences(got, want, BOUNDS["32"], False, ())


def test_what_is_no_difference() -> None:
    want = _result()
    got = copy.deepcopy(want)
    got.state["0.w"] = got.state["0.w"] * (1 + 1e-7)
    got.logged[0][0][1]["seconds"] = 5.0
    assert not differences(got, want, BOUNDS["32"], False, ("sec*",))
    assert differences(got, want, BOUNDS["32"], False, ())


def test_a_low_precision_weight_is_compared_rounded() -> None:
    want = _result()
    want.state["0.w"] = torch.tensor([1.001, 2.0])
    got = copy.deepcopy(want)
    got.state["0.w"] = want.state["0.w"].bfloat16()
    assert not differences(got, want, 1e-6, True, ())
    got.state["0.w"][1] = 2.25
    assert differences(got, want, BOUNDS["bf16"], True, ())


def test_what_stands_still_is_noticed() -> None:
    result = _result()
    assert not still(result, ())
    result.state["0.w"] = result.start["w"]
    assert still(result, ()) == ["w"]
    assert not still(result, ("w*",))


def _raised(name: str = "ValueError", message: str = "Use that instead", wrong: tuple[str, ...] = ()) -> Fate:
    return Fate((name, "Exception"), message, list(wrong), {})


def _went_on(**digests: str) -> Fate:
    return Fate((), "", [], digests)


@pytest.mark.parametrize(
    ("fates", "refusal", "verdict"),
    [
        ([_went_on(w="a"), _went_on(w="a")], None, "equal"),
        ([_went_on(w="a"), _went_on(w="b")], None, "differs"),
        ([_raised(), _raised()], _REFUSAL, "refused"),
        ([_went_on(w="a"), _went_on(w="a")], _REFUSAL, "differs"),
        ([_raised(), _went_on()], _REFUSAL, "differs"),
        ([_raised(), _raised("TypeError")], _REFUSAL, "fails"),
        ([_raised(), _raised(message="no")], _REFUSAL, "fails"),
        ([_raised(), _raised(wrong=("after batch 0: w",))], _REFUSAL, "differs"),
    ],
)
def test_verdicts(fates: list[Fate], refusal: Refusal | None, verdict: str) -> None:
    assert judge(fates, refusal)[0] == verdict


def test_the_programs_are_as_many_as_promised() -> None:
    every = programs().values()
    assert len(every) >= 120
    assert sum(program.on_three_ranks for program in every) >= 20
    for program in every:
        assert len(program.what) <= 120 and program.what.endswith(".") and "\n" not in program.what, program.name
        assert set(program.strategies) & set(STRATEGIES), program.name
