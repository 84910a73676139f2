"""Skipped frames train: gradients and parameters equal the reference's, and nothing stays gathered."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.engine.compile.models import BLOCKS, WIDTH, Spec, build
from tests.engine.compile.training import Outcome, train

#: One block's largest layer, with its bias.
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
#: Reductions add the ranks' gradients in another order than the reference, and uses within a rank too.
ROUNDING = 2e-7


def run(ranks: Any, spec: Spec, stage: int, **options: Any) -> Outcome:
    outcomes = ranks.run(partial(train, partial(build, spec), stage, **options))
    for outcome in outcomes:
        assert outcome.error <= ROUNDING, outcome
        assert not outcome.still, outcome
        assert outcome.forward_end == outcome.backward_end == 0, outcome
    return outcomes[0]


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.thorough), 2, 3])
@pytest.mark.parametrize("block", BLOCKS)
def test_every_kind_of_frame(ranks2: Any, block: str, stage: int) -> None:
    outcome = run(ranks2, Spec((block, "compiled")), stage)
    skipped = stage == 3 and block in ("loop", "raw", "disabled", "raising", "arguments")
    assert any(name.startswith("blocks.0") for name in outcome.eager) == skipped


@pytest.mark.slow
@given(
    blocks=st.lists(st.sampled_from([*BLOCKS, "again", "first"]), min_size=1, max_size=4).map(
        lambda names: ("compiled", *names)
    ),
    frozen=st.lists(st.integers(0, 4), max_size=1).map(tuple),
    root_breaks=st.booleans(),
    stage=st.integers(1, 3),
)
@settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_generated_models(
    ranks2: Any, blocks: tuple[str, ...], frozen: tuple[int, ...], root_breaks: bool, stage: int
) -> None:
    run(ranks2, Spec(blocks, frozen, root_breaks), stage)
