"""Programs as users write them, on the simulated device: equal to DDP on the CPU, or refused in the same words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_zeroplus.testing import RankPool
from tests.programs.cell import Cells
from tests.programs.program import programs

_PROGRAMS = programs()
#: One program in so many with ``--thorough``, and one in so many by default. The strategies take turns.
_THOROUGH, _EVERY = 10, 40
_ON_CPU = "it makes tensors on the CPU, or does not move its batches, and so does not run under DDP on a GPU"
#: What the device cannot run, and what DDP cannot run on a GPU either.
_LEFT_OUT = {
    **dict.fromkeys(
        (
            "fabric_clips_by_torch",
            "fabric_copies",
            "fabric_forward_method",
            "fabric_gan_by_name",
            "fabric_samples_before_the_step",
            "fabric_three_models",
            "fabric_two_models_in_fp16",
            "lazy_layers",
            "samples_then_all_reduce",
            "shrink_and_perturb",
        ),
        _ON_CPU,
    ),
    "device_statistics": "the metrics are the device's",
    "exported_with_an_average": "a part of it is DDP's, whose timer needs CUDA itself",
    "fabric_compiled": "torch.compile for CUDA needs Triton",
    "gpt2_pretrained": "transformers asks for the package accelerate where Lightning makes modules on the device",
}


def _marks(at: int) -> list[pytest.MarkDecorator]:
    if at % _EVERY == 0:
        return []
    return [pytest.mark.thorough] if at % _THOROUGH == 0 else [pytest.mark.every_cell]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cells]:
    yield Cells(tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(
            name,
            program.strategies[at % len(program.strategies)],
            id=f"{name}-{program.strategies[at % len(program.strategies)]}",
            marks=_marks(at),
        )
        for at, (name, program) in enumerate(_PROGRAMS.items())
        if name not in _LEFT_OUT
    ],
)
def test_program_on_the_device(cuda_ranks: RankPool, ranks2: RankPool, cells: Cells, name: str, strategy: str) -> None:
    outcome = cells.run(cuda_ranks, _PROGRAMS[name], strategy, references=ranks2)
    assert outcome.right, f"{outcome.verdict}: {outcome.details}"
