"""Programs as users write them: each is equal to DDP under every strategy, or refused by name before harm.

By default one of ten programs runs once, the strategies taking turns, and cells that have shown a defect.
``--thorough`` runs a third of them under one of the stages and FSDP2, taking turns, some under a further setting, and
some on three and on four ranks. ``--every-cell`` runs all cells: ``benchmarks/compatibility.py`` makes the table in
docs/compatibility.md of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_zeroplus.testing import RankPool
from tests.programs.cell import Cells
from tests.programs.program import Program, programs
from tests.support.turns import turn

_PROGRAMS = programs()
#: Cells that have shown a defect, some of them after they had been right. Their turn by default would never come.
_ALWAYS = {
    ("exported_with_an_average", "fsdp"),
    ("renamed_keys", "fsdp"),
    ("compiled_ahead_of_time", "fsdp"),
    ("compiled_network_averaged", "fsdp"),
    ("activation_wrapper_resumed", "fsdp"),
    ("activation_wrapper_resumed", "stage3"),
    ("activation_wrapper_applied", "stage3"),
    ("saved_by_earlier_names_and_changed", "stage2"),
    ("adapted_in_validation", "stage3_mixed"),
    ("gradient_accumulation_scheduler", "stage3_mixed"),
}


def _cells(every: bool) -> list[Any]:
    """The cells to run, or all of them: most are not made where they are not asked for, which takes seconds."""
    cells = []
    for name, program in _PROGRAMS.items():
        for strategy in program.strategies:
            marks = [] if _by_default(program, strategy) else [pytest.mark.thorough]
            if every or not marks or _thorough(program, strategy):
                cells.append(pytest.param(name, strategy, id=f"{name}-{strategy}", marks=marks))
    return cells


def _by_default(program: Program, strategy: str) -> bool:
    index, names = turn(program.name), program.strategies
    is_its_turn = index % 10 == 0 and strategy == names[index // 10 % len(names)]
    return is_its_turn or (program.name, strategy) in _ALWAYS


def _thorough(program: Program, strategy: str) -> bool:
    index, names = turn(program.name), program.strategies
    stages = [name for name in names if "_" not in name]  # and FSDP2; the others have a further setting
    if strategy in stages:
        return (index // 5 + stages.index(strategy)) % 15 == 0
    return (index // 5 + names.index(strategy)) % 72 == 0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_program:
        metafunc.parametrize(("name", "strategy"), _cells(metafunc.config.getoption("--every-cell")))


_ON_THREE_RANKS = [
    pytest.param(
        name,
        program.strategies[turn(name) % len(program.strategies)],
        id=name,
        marks=[pytest.mark.every_cell] if turn(name) % 2 else [],
    )
    for name, program in _PROGRAMS.items()
    if program.on_three_ranks
]
#: With FSDP2, in two replicas of two shards.
_ON_FOUR_RANKS = [
    pytest.param(name, id=name, marks=[pytest.mark.every_cell] if turn(name) % 8 else [])
    for name, program in _PROGRAMS.items()
    if program.on_three_ranks and "fsdp" in program.strategies
]


def test_program(
    ranks2: RankPool, cells: Cells, name: str, strategy: str, record_property: Callable[[str, Any], None]
) -> None:
    outcome = cells.run(ranks2, _PROGRAMS[name], strategy)
    for key, value in outcome._asdict().items():
        record_property(key, value)  # what --junitxml keeps, for the table
    assert outcome.right, f"{outcome.verdict}: {outcome.details}"


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "strategy"), _ON_THREE_RANKS)
def test_program_on_three_ranks(ranks: Callable[[int], RankPool], cells: Cells, name: str, strategy: str) -> None:
    outcome = cells.run(ranks(3), _PROGRAMS[name], strategy)
    assert outcome.right, f"{outcome.verdict}: {outcome.details}"


@pytest.mark.thorough
@pytest.mark.parametrize("name", _ON_FOUR_RANKS)
def test_program_on_replicas(ranks: Callable[[int], RankPool], cells: Cells, name: str) -> None:
    outcome = cells.run(ranks(4), _PROGRAMS[name], "fsdp_replicas")
    assert outcome.right, f"{outcome.verdict}: {outcome.details}"
