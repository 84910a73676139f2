"""No race in our engine on any number of streams, and one for each synchronization that is taken away."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lightning_zeroplus.engine.build import build_engine
from tests.testing.streams.conftest import note_races
from tests.testing.streams.scenarios import Scenario, label, run
from tests.testing.streams.test_stock_races import zero

MODELS = ("chain", "towers", "fan_in")


def run_ours(scenario: Scenario, buffers: int, drop: str | None, steps: int) -> tuple[list[str], list[str], int]:
    """What raced, the sites that synchronize, and how much ran."""
    found = run(scenario, partial(build_engine, bucket_buffers=buffers), drop=drop, steps=steps, lifetime=drop is None)
    return [str(race) for race in found.races], sorted(found.sites), found.kernels


def ours(ranks: Any, scenario: Scenario, buffers: int = 2) -> None:
    results = ranks.run(run_ours, scenario, buffers, None, 2)
    note_races("ours", f"{label(scenario)} buffers={buffers}", sum(len(races) for races, _, _ in results))
    for races, _, kernels in results:
        assert kernels > 100
        assert not races, "\n".join(races)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "oversized",
    [(), pytest.param((6,), marks=pytest.mark.slow), (6, 14)],
    ids=["", "oversized", "two_oversized"],
)
@pytest.mark.parametrize(("stage", "overlap"), [*product((1, 2, 3), (True, False))])
@pytest.mark.parametrize("model", MODELS)
def test_buckets(ranks2: Any, model: str, stage: int, overlap: bool, oversized: tuple[int, ...]) -> None:
    ours(ranks2, Scenario(model, zero=zero(stage, overlap), oversized=oversized))


@pytest.mark.sampled
@pytest.mark.parametrize("buffers", [3, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_more_buffers(ranks2: Any, model: str, buffers: int) -> None:
    ours(ranks2, Scenario(model, streams=3, zero=zero(), oversized=(6,)), buffers)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options", [{"contiguous_gradients": False}, {"offload_optimizer": {"device": "cpu"}}], ids=str
)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_other_layouts(ranks2: Any, model: str, overlap: bool, options: dict[str, Any]) -> None:
    ours(ranks2, Scenario(model, zero=zero(2, overlap, **options)))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["bf16", "bf16_fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_low_precision(ranks2: Any, stage: int, dtype: str) -> None:
    ours(ranks2, Scenario("towers", dtype=dtype, zero=zero(stage)))


@pytest.mark.sampled
@pytest.mark.parametrize("unjoined", [True, False])
@pytest.mark.parametrize(("stage", "model"), [*product((1, 2, 3), MODELS)])
def test_windows(ranks2: Any, model: str, stage: int, unjoined: bool) -> None:
    ours(ranks2, Scenario(model, zero=zero(stage), backwards=3, window=True, unjoined=unjoined))


@pytest.mark.sampled
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("stage", "model"), [*product((1, 2), ("chain", "towers"))])
@pytest.mark.parametrize("window", [True, False])
def test_backwards_that_nobody_joined(
    ranks2: Any, window: bool, stage: int, model: str, overlap: bool, contiguous: bool
) -> None:
    options = zero(stage, overlap, contiguous_gradients=contiguous)
    ours(ranks2, Scenario(model, zero=options, backwards=2, window=window, unjoined=True))


LAYERS = 8


_ANY = given(
    model=st.sampled_from(MODELS),
    assigned=st.lists(st.integers(0, 3), min_size=LAYERS, max_size=LAYERS).map(tuple),
    bucket=st.integers(100, 3000),
    oversized=st.sets(st.integers(0, LAYERS - 1), max_size=2).map(tuple),
    options=st.builds(zero, st.integers(1, 3), st.booleans(), contiguous_gradients=st.booleans()),
    backwards=st.integers(1, 3),
    unjoined=st.booleans(),
    window=st.booleans(),
    own_streams=st.booleans(),
    buffers=st.integers(2, 4),
)
_ON_RANKS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _train(ranks2: Any, model: str, buffers: int, options: dict[str, Any], **rest: Any) -> None:
    ours(ranks2, Scenario(model, zero=options, layers=LAYERS, streams=4, **rest), buffers)


@_ANY
@example(  # gradients of one stream, summed on another
    model="chain",
    assigned=(0,) * LAYERS,
    bucket=100,
    oversized=(),
    options=zero(1, False, contiguous_gradients=False),
    backwards=3,
    unjoined=True,
    window=True,
    own_streams=False,
    buffers=2,
)
@settings(_ON_RANKS, max_examples=8)
def test_any_streams_and_bucket_sizes(ranks2: Any, **drawn: Any) -> None:
    _train(ranks2, **drawn)


@pytest.mark.thorough
@_ANY
@settings(_ON_RANKS, max_examples=25)
def test_more_streams_and_bucket_sizes(ranks2: Any, **drawn: Any) -> None:
    _train(ranks2, **drawn)


def _sums_of_two_streams(drop: str | None) -> tuple[int, list[str]]:
    import torch
    from torch import nn

    from lightning_zeroplus.engine.reduction.local_sums import LocalSums
    from lightning_zeroplus.testing.streams import StreamSanitizer

    with StreamSanitizer(drop=drop) as sanitizer:
        local_sums = LocalSums(hooks_reduce=True, until_step=True)
        param = nn.Parameter(torch.zeros(8))
        for name in ("one", "another"):
            with sanitizer.on(sanitizer.stream(name)):
                param.grad = torch.ones(8)
                assert local_sums.take(0, param)
        local_sums.settle()
        assert local_sums.sums[0].clone().tolist() == [2.0] * 8
    return len(sanitizer.races), list(sanitizer.sites)


def test_a_sum_over_streams_is_ordered(ranks2: Any) -> None:
    for races, sites in ranks2.run(_sums_of_two_streams, None):
        assert not races
        waits = [site for site in sites if site.startswith("wait_event")]
        assert len(waits) == 2, sites
        for site in waits:
            assert all(dropped for dropped, _ in ranks2.run(_sums_of_two_streams, site)), site


def _dropped_sums(recorded: bool) -> list[str]:
    import torch
    from torch import nn

    from lightning_zeroplus.engine.reduction.local_sums import LocalSums
    from lightning_zeroplus.engine.reduction.streams import Writers
    from lightning_zeroplus.testing.streams import StreamSanitizer

    with StreamSanitizer(lifetime=True) as sanitizer, pytest.MonkeyPatch.context() as patch:
        if not recorded:
            patch.setattr(Writers, "use", lambda self, tensor: None)
        local_sums = LocalSums(hooks_reduce=True, until_step=True)
        param = nn.Parameter(torch.zeros(8))
        streams = [sanitizer.stream("one"), sanitizer.stream("another")]
        for stream in streams:
            with sanitizer.on(stream):
                param.grad = torch.ones(8)
                assert local_sums.take(0, param)
        local_sums.discard()
        with sanitizer.on(streams[0]):
            torch.ones(8).add_(1)  # may get the memory of the sum, which the other stream still writes
    return [race.kind for race in sanitizer.races]


def test_sums_that_are_dropped_outlive_their_writers(ranks2: Any) -> None:
    assert ranks2.run(_dropped_sums, True) == [[], []]
    assert all("use-after-free" in kinds for kinds in ranks2.run(_dropped_sums, False))


#: What together reaches every synchronization of the reduction.
SCENARIOS = [
    Scenario("towers", zero=zero(2, False), backwards=2, unjoined=True),
    Scenario("towers", zero=zero(), oversized=(6, 14)),
    Scenario("towers", zero=zero(2, False, contiguous_gradients=False)),
    Scenario("towers", zero=zero(2, contiguous_gradients=False)),
    Scenario("towers", zero=zero(2), backwards=3, window=True, unjoined=True),
    Scenario("towers", zero=zero(3, stage3_param_persistence_threshold=0), streams=3),
    Scenario("towers", zero=zero(3), backwards=3, window=True, unjoined=True),
]

#: Synchronizations that nothing of a step needs, by kind and function, and why.
SURVIVORS = {
    "device.synchronize destroy": "the engine is closed: no gradient is read after it",
    "device.synchronize _allreduce_noncontiguous_bucket_preserving_fp32": "the copy before it is in stream order",
    # Without it, simulated_cuda/test_mutations.py races.
    "wait_stream _PartitionedParameterCoordinator__all_gather_params": "gloo lets the host wait in this model",
    "event.synchronize _fetch_sub_module_impl": "upstream holds the host back, which bounds what it allocates",
    "event.synchronize __reduce_and_partition_ipg_grads": "the same",
    # simulated_cuda/test_mutations.py races without it.
    "wait_stream synchronize": "the step waits for who wrote the partition; this orders memory that is given back",
}


@pytest.mark.slow
def test_every_synchronization_is_needed(ranks2: Any) -> None:
    """Drop one at a time: it races, or the list above says why not. Memory reuse (``record_stream``) is not a race."""
    where: dict[str, list[Scenario]] = {}
    for scenario in SCENARIOS:
        for races, sites, _ in ranks2.run(run_ours, scenario, 2, None, 2):
            assert not races
            for site in sites:
                if "scenarios.py" not in site and not site.startswith("record_stream"):
                    where.setdefault(site, []).append(scenario)
    table = {}
    for site, scenarios in where.items():
        raced = any(any(races for races, _, _ in ranks2.run(run_ours, each, 2, site, 2)) for each in scenarios)
        table[site] = "races without it" if raced else SURVIVORS.get(f"{site.split()[0]} {site.split()[-1]}")
        print(f"{site}: {table[site]}")
    assert not [site for site, fate in table.items() if fate is None]
    ours = [fate for site, fate in table.items() if "reduction/" in site and "host_waits" not in site]
    assert len(ours) >= 2 and set(ours) == {"races without it"}
