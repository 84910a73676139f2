"""Programs as users write them, on the simulated device: equal to DDP on the CPU, or refused in the same words.

Nothing that they do there races.
"""

from __future__ import annotations

import pytest

from lightning_zeroplus.testing import RankPool
from tests.programs.cell import Cells
from tests.programs.on_gpus import LEFT_OUT
from tests.programs.program import COMPILE, Program, programs
from tests.support.turns import turn

_PROGRAMS = programs()
#: One program in so many with ``--thorough``, and one in so many by default. The strategies take turns.
_THOROUGH, _EVERY = 20, 100
_DRAWS = "it draws weights on the device, whose numbers are not the CPU's"
#: What the device cannot run, and what DDP cannot run on a GPU either.
_LEFT_OUT = {
    **LEFT_OUT,
    "fabric_init_module": _DRAWS,
    "fabric_init_module_in_bf16": _DRAWS,
    "bert_late": _DRAWS,
    "gpt2_late": _DRAWS,
    "llama_late": _DRAWS,
    "adapters_late": _DRAWS,
    "reinitialized": _DRAWS,
    "noise_in_each_step": _DRAWS,
    "quantization_aware": "one of its kernels says nothing of the memory that it uses",
    "bert_pretrained": "at stage 3 transformers asks for accelerate on a GPU",
    "llama_pretrained": "transformers asks for accelerate within a device's context, which Lightning opens on a GPU",
    "exported_with_an_average": "a part of it is DDP's, whose timer needs CUDA itself",
    "checkpoint_loads_under_ddp": "the same",
    "then_ddp": "the same",
    "ddp_first": "the same",
    "exported_and_resumed_under_ddp": "the same",
    "ema_resumed_under_ddp": "the same",
    "exported_with_several_optimizers": "the same",
    "loss_scaler_of_ddp": "the same",
    "shared_optimizers_from_ddp_and_back": "the same",
    "codes_of_ddp": "the same",
    "codes_under_ddp": "the same",
    "wrapped_states_of_ddp": "the same",
    "mixed_backwards_16_mixed": "under FSDP2 a sum stays in fp32 that overflows fp16 under DDP, see docs/dtypes.md",
    "compiled_in_place": "torch.compile for CUDA needs Triton",
    "compiled_ahead_of_time": "the same",
    "fabric_compiled": "the same",
    "stepped_by_a_compiled_function": "Dynamo has no tensors of the device",
    "weights_in_a_compiled_function": "the same",
    "kept_in_configure_optimizers": "refused at stage 3 on a GPU, see below",
    "gpt2_pretrained": "transformers asks for the package accelerate where Lightning makes modules on the device",
}


def _marks(name: str) -> list[pytest.MarkDecorator]:
    if turn(name) % _EVERY == 0:
        return []
    return [pytest.mark.thorough] if turn(name) % _THOROUGH == 0 else [pytest.mark.every_cell]


def _strategy(program: Program) -> str:
    names = [name for name in program.strategies if name not in COMPILE]  # DeepCompile's extension needs CUDA itself
    return names[turn(program.name) // _EVERY % len(names)]


def test_tensors_that_are_kept_on_the_host_are_refused_at_stage_3(
    cuda_ranks: RankPool, ranks2: RankPool, cells: Cells
) -> None:
    """They would not follow. At other stages the weights are on the device when `configure_optimizers` is called."""
    program = _PROGRAMS["kept_in_configure_optimizers"]
    outcome = cells.run(cuda_ranks, program, "stage3", references=ranks2)
    assert "share the memory of net.0.weight" in outcome.details and "Take them in `on_fit_start`" in outcome.details


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("late_branch", "stage3"),  # a rank reduces zeros for what another has, and reads its partitions next
        ("fabric_gan_set_up_apart", "stage3"),  # an engine without an optimizer gathers what another's step writes
        ("old_spectral_norm", "stage3"),  # a plain tensor on the host has the first memory of a weight
        ("low_read_in_a_window", "stage3_offload"),  # the host looks for overflows in what is still being copied to it
        ("shared_optimizers_twice", "stage0"),  # states of an earlier fit, left on the host
        ("written_in_forward", "fsdp_wrap"),  # a unit is gathered anew after its own forward has written to its shards
    ],
)
def test_defects_that_only_gpus_had(
    cuda_ranks: RankPool, ranks2: RankPool, cells: Cells, name: str, strategy: str
) -> None:
    outcome = cells.run(cuda_ranks, _PROGRAMS[name], strategy, references=ranks2)
    assert outcome.right, f"{outcome.verdict}: {outcome.details}"


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, _strategy(program), id=f"{name}-{_strategy(program)}", marks=_marks(name))
        for name, program in _PROGRAMS.items()
        if name not in _LEFT_OUT
    ],
)
def test_program_on_the_device(cuda_ranks: RankPool, ranks2: RankPool, cells: Cells, name: str, strategy: str) -> None:
    outcome = cells.run(cuda_ranks, _PROGRAMS[name], strategy, references=ranks2)
    assert outcome.right, f"{outcome.verdict}: {outcome.details}"
