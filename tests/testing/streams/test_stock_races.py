"""What the sanitizer finds in DeepSpeed's own engine, on two ranks: what is known to race, and nothing else.

A rank's own partition does not race: DeepSpeed keeps a view of those parameters from when the optimizer is built, so
that the hooks of all of them run on the default stream. It is the other ranks' parameters whose hooks run on the
streams of the forward.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import deepspeed
import pytest

from lightning_zeroplus.testing import RankPool
from lightning_zeroplus.testing.streams import Race
from tests.testing.streams.conftest import note_races
from tests.testing.streams.scenarios import Scenario, label, run, stock

FILL = "reduce_independent_p_g_buckets_and_remove_grads"
REDUCE = "average_tensor"


def races(ranks: RankPool, scenario: Scenario, lifetime: bool = False) -> list[Race]:
    """Of both ranks."""
    results = ranks.run(run_stock, scenario, lifetime)
    assert all(kernels > 200 for _, kernels in results)
    note_races(f"DeepSpeed {deepspeed.__version__}", label(scenario), sum(len(found) for found, _ in results))
    return [race for found, _ in results for race in found]


def run_stock(scenario: Scenario, lifetime: bool) -> tuple[list[Race], int]:
    found = run(scenario, stock, lifetime=lifetime)
    return found.races, found.kernels


def functions(race: Race) -> tuple[str, str]:
    return race.first.location.split()[-1], race.second.location.split()[-1]


def zero(stage: int = 2, overlap: bool = True, **options: Any) -> dict[str, Any]:
    return {"stage": stage, "overlap_comm": overlap, **options}


@pytest.mark.sampled
@pytest.mark.parametrize("oversized", [(), (6, 14)], ids=["", "oversized"])
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16_fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("stage", "overlap", "contiguous"),
    [*product((1, 2), (True, False), (True, False)), (3, True, True), (3, False, True)],
)
def test_one_stream_does_not_race(ranks2, stage, overlap, contiguous, dtype, oversized) -> None:
    options = zero(stage, overlap, contiguous_gradients=contiguous)
    assert not races(ranks2, Scenario(streams=1, oversized=oversized, dtype=dtype, zero=options), lifetime=True)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("model", ["chain", "towers", "fan_in"])
def test_a_buffer_is_filled_again_while_its_reduction_runs(ranks2, stage, model) -> None:
    found = races(ranks2, Scenario(model, zero=zero(stage)))
    assert found
    for race in found:
        assert race.buffer.startswith("ipg buffer ")
        assert {race.first.stream} <= {"reduction", "communication"}
        assert functions(race)[1] == FILL


@pytest.mark.parametrize("stage", [1, 2])
def test_an_oversized_gradient_is_reduced_before_it_is_there(ranks2, stage) -> None:
    found = races(ranks2, Scenario("towers", oversized=(14,), zero=zero(stage)))
    (race,) = (race for race in found if not race.buffer.startswith("ipg buffer "))
    assert race.first.operation == "aten::mm in MmBackward0" or "LinearFunction" in race.first.operation
    assert (race.second.operation.split()[0], race.second.stream) == ("aten::div_", "reduction")
    assert functions(race)[1] == REDUCE
    assert race.span == (0, 4 * 16 * 16 * 4)


@pytest.mark.parametrize("model", ["chain", "towers", "fan_in"])
def test_without_overlap_nobody_waits_for_other_streams(ranks2, model) -> None:
    found = races(ranks2, Scenario(model, zero=zero(overlap=False)))
    assert found and all(race.buffer.startswith("ipg buffer ") for race in found)
    if model != "fan_in":  # where both branches are joined before the next bucket
        assert (FILL, REDUCE) in {functions(race) for race in found}


def test_without_overlap_separate_gradients_race_too(ranks2) -> None:
    found = races(ranks2, Scenario("towers", zero=zero(overlap=False, contiguous_gradients=False)))
    assert {functions(race)[1] for race in found} == {"allreduce_bucket", "allreduce_and_copy"}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        zero(stage=1, overlap=False),
        zero(contiguous_gradients=False),
        zero(offload_optimizer={"device": "cpu"}),
        zero(stage=3),
        zero(stage=3, overlap=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["chain", "towers", "fan_in"])
def test_these_are_safe_on_several_streams(ranks2, model, options) -> None:
    assert not races(ranks2, Scenario(model, oversized=(14,), zero=options))
