"""What a step costs a real GPU: the host waits no more often than on the simulated device, and memory is as planned."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_zeroplus.testing import RankPool
from tests.testing.simulated_cuda.cost import Case, measure
from tests.testing.simulated_cuda.planned import Case as PlannedCase
from tests.testing.simulated_cuda.planned import measure as measure_memory
from tests.testing.simulated_cuda.test_plan import name_of, planned_step

STRATEGIES: tuple[int | str, ...] = (0, 1, 2, 3, "fsdp")


def _cases() -> Iterator[object]:
    for strategy in STRATEGIES:
        for window, clip, precision in (
            (False, False, "32-true"),
            (True, False, "32-true"),
            (False, True, "32-true"),
            (False, False, "bf16-true"),
        ):
            parts = [str(strategy), precision, *["window"] * window, *["clip"] * clip]
            yield pytest.param(Case(strategy, window=window, clip=clip, precision=precision), id="-".join(parts))


@pytest.mark.parametrize("case", list(_cases()))
def test_the_host_never_waits(gpu_ranks: RankPool, case: Case) -> None:
    for cost in gpu_ranks.run(measure, case):
        assert cost.kernels > 50, "the profiler has seen the step"
        assert (cost.waits_in_backwards, cost.waits_in_step) == (0, 0), cost.places
        assert cost.held_back == 0 or case.strategy == 3


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_in_fp16_it_waits_once_for_the_norm(gpu_ranks: RankPool, strategy: int) -> None:
    for cost in gpu_ranks.run(measure, Case(strategy, precision="16-true")):
        assert cost.waits_in_backwards == 0 and cost.waits_in_step <= 1, cost.places


_CUBLAS = 65 * 2**20
_LARGE = {"layers": 8, "width": 4096}


@pytest.mark.parametrize(
    "case",
    [
        *(PlannedCase(stage, **_LARGE) for stage in range(4)),
        PlannedCase(2, window=True, **_LARGE),
        PlannedCase(2, offload=True, **_LARGE),
        PlannedCase(3, window=True, precision="bf16-mixed", **_LARGE),
        PlannedCase("fsdp", wrap=True, **_LARGE),
    ],
    ids=name_of,
)
def test_memory_is_as_planned(gpu_ranks: RankPool, case: PlannedCase) -> None:
    """Within 5 %, and what cuBLAS takes for itself: twice 32 MiB on Hopper."""
    planned = planned_step(case)
    for measured in gpu_ranks.run(measure_memory, case):
        print(f"{name_of(case)}: peak {measured.peak} planned {planned.peak} between {measured.between}")
        assert planned.peak == pytest.approx(measured.peak, rel=0.05, abs=_CUBLAS)
        assert planned.between == pytest.approx(measured.between, rel=0.05, abs=_CUBLAS)
