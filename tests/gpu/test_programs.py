"""Programs as users write them, on real GPUs with NCCL: equal to DDP there, or refused in the same words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_zeroplus.testing import RankPool
from tests.programs.cell import Cells
from tests.programs.program import programs

_PROGRAMS = programs()
_OWN_TENSORS = "it has tensors of its own on the CPU"
#: What DDP cannot run on a GPU, or runs as another program there.
_LEFT_OUT = {
    "lazy_layers": "its first forward, in `configure_model`, is on the device of neither weights nor batches",
    "device_statistics": "the metrics are the device's",
    "fabric_average": _OWN_TENSORS,
    "fabric_clips": _OWN_TENSORS,
    "fabric_copies": _OWN_TENSORS,
    "fabric_default_dtype": _OWN_TENSORS,
    "fabric_loads_everything": _OWN_TENSORS,
    "fabric_loads_raw": _OWN_TENSORS,
    "no_optimizer_of_a_late_model": _OWN_TENSORS,
    "grads_kept_of_an_embedding": "NCCL reduces no sparse tensors",
    "sparse_embedding": "the same",
    "low_sparse_embedding": "the same",
    "shared_optimizers_twice": "the states of LBFGS stay on the device of the first fit, and the weights do not",
    "pruning": "on a GPU Lightning gives the weights memory of their own, on the CPU that of others: another program",
}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cells]:
    yield Cells(tmp_path_factory.mktemp("programs"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, id=f"{name}-{strategy}")
        for at, (name, program) in enumerate(_PROGRAMS.items())
        for strategy in [program.strategies[at % len(program.strategies)]]  # the strategies take turns
        if name not in _LEFT_OUT
    ],
)
def test_program_on_a_gpu(gpu_ranks: RankPool, cells: Cells, name: str, strategy: str) -> None:
    outcome = cells.run(gpu_ranks, _PROGRAMS[name], strategy)
    assert outcome.right, f"{outcome.verdict}: {outcome.details}"
