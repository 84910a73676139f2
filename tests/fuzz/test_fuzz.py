"""Random programs are equal to a single process under every strategy; the same seed always gives the same program.

``FUZZ_SEED=17 pytest tests/fuzz`` runs the program of this seed under all strategies. A failure shows the program;
``python -m tests.fuzz 17 stage2`` makes it smaller.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_zeroplus.testing import RankPool
from tests.fuzz.generate import generate
from tests.fuzz.program import Program
from tests.fuzz.run import STRATEGIES, Comparison, compare, train
from tests.fuzz.shrink import shrink
from tests.fuzz.statements import Backward, Loss, Step, Zero

_NAMES = list(STRATEGIES)
_DEFAULT = len(_NAMES)
_THOROUGH = 120
_EVERY = 200
_ON_THREE_RANKS = 12


def _cases() -> list[Any]:
    """All strategies for a seed that is asked for, else one strategy after the other."""
    asked = os.environ.get("FUZZ_SEED")
    if asked is not None:
        return [pytest.param(int(asked), name, id=f"{asked}-{name}") for name in _NAMES]
    turns = [(seed, _NAMES[seed % len(_NAMES)]) for seed in range(_EVERY)]
    return [pytest.param(seed, name, id=f"{seed}-{name}", marks=_marks(seed)) for seed, name in turns]


def _marks(seed: int) -> list[pytest.MarkDecorator]:
    if seed < _DEFAULT:
        return []
    return [pytest.mark.thorough if seed < _THOROUGH else pytest.mark.every_cell]


@pytest.mark.parametrize(("seed", "strategy"), _cases())
def test_random_program(ranks2: RankPool, seed: int, strategy: str) -> None:
    _check(ranks2, seed, strategy)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(1000, 1000 + _ON_THREE_RANKS))
def test_random_program_on_three_ranks(ranks: Callable[[int], RankPool], seed: int) -> None:
    _check(ranks(3), seed, _NAMES[seed % len(_NAMES)])


#: Programs beyond these seeds that once failed, and what of them was the cause: it must still be there.
_FOUND = [
    (63, "stage3", "coalesce(max_bytes"),  # hooks have reduced different gradients on each rank
    (2001, "stage3_step", "p.grad.add_"),  # a gradient is read while another rank gathers
    (2025, "stage3", "reentrant"),  # a gradient comes twice while the ranks part
    (2112, "stage3", "p.mul_(0.9)"),  # the ranks meet within zp.gathered()
    (2166, "stage3", "nn.init.constant_"),  # one rank has kept a weight that zp.gathered() gathers
    (9016, "stage2", "reentrant"),  # one rank's backward seems to end where a checkpoint's ends
    (9016, "fsdp", "reentrant"),
    (9030, "stage2", "nested"),  # so that there seem to be two
    (106, "fsdp", "l3.backward()"),  # counted in a window
    (2006, "fsdp", "l0.backward()"),  # its end, where the ranks differ
    (71, "fsdp_step", "requires_grad_(False)"),  # frozen before the step
    (3145, "fsdp", "net.layers.1.zero_grad()"),  # dropped after a backward in no_sync()
    (3150, "fsdp_step", "p.grad = None"),
    (3170, "stage2_offload", "coalesce(max_bytes"),  # a backward that defers all, where another kind was expected
    (77362, "fsdp_wrap", "nested"),  # at the end of a backward, units that it had not reached were gathered
    (77141, "fsdp_wrap", "penalty"),  # within zp.gathered() a unit was still unsharded on one rank
]


@pytest.mark.parametrize(("seed", "strategy", "cause"), _FOUND)
def test_program_that_once_failed(ranks2: RankPool, seed: int, strategy: str, cause: str) -> None:
    assert cause in str(generate(seed).under(strategy))
    _check(ranks2, seed, strategy)


def test_program_that_once_failed_on_three_ranks(ranks: Callable[[int], RankPool]) -> None:
    _check(ranks(3), 3020, "stage2")  # a frozen weight was divided by three where partitions are made anew


def _check(pool: RankPool, seed: int, strategy: str) -> None:
    program = generate(seed).under(strategy)
    answers = pool.run(train, program, strategy)
    if any(isinstance(answer, str) for answer in answers):
        pool.close()  # what an exception has left behind is of no concern to the next case
    outcome = compare(program, answers)
    assert not outcome.wrong, f"under {strategy}:\n" + "\n".join(outcome.wrong) + f"\n\n{program}"


@pytest.mark.parametrize("seed", [0, 7, 11])
def test_seed_gives_one_program(seed: int) -> None:
    assert generate(seed) == generate(seed) != generate(seed + 1)
    assert f"seed {seed}:" in str(generate(seed))


def test_most_programs_move_most_parameters() -> None:
    moved = []
    for seed in range(_DEFAULT):
        comparison = Comparison.of(generate(seed), 2)
        moved += [not torch.equal(comparison.start[name], end) for name, end in comparison.want.state.items()]
    assert sum(moved) > 0.7 * len(moved)


def _small_program() -> Program:
    body = (Loss("l0"), Backward("l0"), Loss("l1", half=0), Backward("l1"), Step(), Zero())
    return replace(generate(0), before=(), body=body, scheduled=False, grouped=False, optimizer="sgd", batches=3)


def test_lost_gradient_is_noticed(ranks2: RankPool) -> None:
    program = _small_program()
    lossy = replace(program, body=(*program.body[:3], *program.body[4:]))
    assert not compare(program, ranks2.run(train, program, "stage2")).wrong
    assert compare(program, ranks2.run(train, lossy, "stage2")).wrong


def test_shrinks_to_what_fails() -> None:
    program = generate(8)

    def has_a_step(smaller: Program) -> bool:
        return any(isinstance(statement, Step) for statement in smaller.body)

    smallest = shrink(program, has_a_step)
    assert smallest.body == (Step(),)
    assert smallest.batches == 1 and len(smallest.model.layers) == 1
