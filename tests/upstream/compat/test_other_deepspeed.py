"""The oldest supported DeepSpeed, and others: gradients, windows, streams and resuming, as on the newest.

``DEEPSPEED_VERSIONS="0.19.4 /path/of/a/checkout" pytest tests/upstream/compat`` tests others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lightning_zeroplus.testing import RankPool
from tests.engine.several.turns import BOUNDS, SETUPS, errors
from tests.matrix.cells import Cell, run_cell
from tests.matrix.test_gradient_matrix import check
from tests.programs.program import programs
from tests.strategy.test_trainer_features import check_overflows, steps_after_overflows
from tests.support.turns import turn
from tests.testing.streams.scenarios import Scenario, run, stock
from tests.testing.streams.test_ours import run_ours
from tests.testing.streams.test_stock_races import zero
from tests.upstream.compat.installed import VERSIONS, OtherRanks, check_tests, folder, is_path

pytestmark = pytest.mark.slow
STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[Callable[[str], RankPool]]:
    """``ranks_of(version)``: two ranks that import that DeepSpeed."""
    pools: dict[str, RankPool] = {}

    def pool(version: str) -> RankPool:
        if version not in pools:
            for other in pools.values():
                other.close()  # not needed any more, and starts again if it is
            pools[version] = OtherRanks(folder(version))
        return pools[version]

    yield pool
    for each in pools.values():
        each.close()


# Sorted by version: one pool at a time.
@pytest.fixture(scope="module", params=VERSIONS)
def version(request: Any) -> str:
    return request.param


@pytest.fixture(scope="module")
def ranks(version: str, ranks_of: Callable[[str], RankPool]) -> RankPool:
    return ranks_of(version)


def _where_deepspeed_is() -> tuple[str, str]:
    import deepspeed

    return deepspeed.__version__, deepspeed.__file__


def test_the_ranks_import_it(ranks: OtherRanks, version: str) -> None:
    for imported, file in ranks.run(_where_deepspeed_is):
        assert file.startswith(str(folder(version)))
        assert imported == version or is_path(version)


#: What a user reads and writes at stage 3, where releases differ most: in what a graph keeps, and when it is released.
FAMILIES = ("graph_views", "kept_views", "own_forwards", "kept_gradients", "packages", "in_backwards")


@pytest.mark.every_cell
def test_programs(version: str) -> None:
    """Programs of docs/compatibility.md at stage 3."""
    names = " or ".join(name for name, program in programs().items() if program.family in FAMILIES)
    check_tests(folder(version), "--every-cell", "tests/programs/test_programs.py", "-k", f"stage3] and ({names})")


def _cells() -> dict[str, Cell]:
    cells = [Cell(stage, pattern) for stage, pattern in product(STAGES, ("several", "unused", "leaf_hook"))]
    cells += [Cell(stage, "nested", reduction="backward") for stage in STAGES]
    cells += [Cell(stage, "several", precision="bf16-true") for stage in STAGES]
    cells += [Cell(stage, "several", clip=(0.05, "norm"), optimizer="adamw") for stage in STAGES]
    cells += [Cell(stage, "several", precision="16-true", clip=(0.01, "value")) for stage in STAGES]
    cells += [Cell(stage, "several", precision=f"{kind}-mixed") for stage in STAGES for kind in ("bf16", "16")]
    cells += [Cell(stage, "single", automatic=True, across=4) for stage in STAGES]
    cells += [Cell(stage, "unused", offload="cpu") for stage in (1, 2, 3)]
    cells += [Cell(stage, "unused", across=2, offload="cpu") for stage in (1, 2, 3)]
    cells += [Cell(stage, "unused", offload="cpu", precision="16-true") for stage in (1, 2, 3)]
    cells += [
        Cell(stage, "unused", precision="bf16-true", accumulate_dtype="float32", window="all") for stage in STAGES
    ]
    cells += [Cell(stage, "unused", zero={"overlap_comm": True, "reduce_scatter": False}) for stage in (2, 3)]
    cells += [Cell(stage, "unused", zero={"round_robin_gradients": True}) for stage in (1, 2)]
    for stage, window in product(STAGES, ("all", "backwards", "budget", "no_sync")):
        cells.append(Cell(stage, "several", window=window, reduction="backward"))
    for stage, window in product((2, 3), ("all", "backwards", "budget")):
        cells.append(Cell(stage, "unused", window=window, reduction="backward", offload="cpu"))
    return {_name(cell): cell for cell in cells}


def _name(cell: Cell) -> str:
    default = Cell(0, "")
    changed = {name: value for name, value in vars(cell).items() if value != getattr(default, name)}
    return f"stage{cell.stage}-" + "-".join(f"{name}={value}" for name, value in changed.items() if name != "stage")


CELLS = _cells()


@pytest.mark.sampled(otherwise="every_cell")
@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.every_cell] * (turn(name) % 2)) for name in CELLS]
)
def test_gradients(ranks: OtherRanks, name: str) -> None:
    check(CELLS[name], ranks.run(run_cell, CELLS[name]))


@pytest.mark.parametrize("precision", ["16-true", "16-mixed"])
@pytest.mark.parametrize("stage", STAGES)
def test_overflows(ranks: OtherRanks, stage: int, precision: str) -> None:
    check_overflows(ranks.run(steps_after_overflows, stage, "step", precision))


def test_several_optimizers(ranks: OtherRanks) -> None:
    for found in ranks.run(errors, list(SETUPS), list(BOUNDS), [0], timeout=300):
        assert {cell: error for cell, error in found.items() if not error <= BOUNDS[cell[1]]} == {}


#: Those that race on these releases, in upstream's hands: buckets, oversized parameters, no overlap, no buffers.
SCENARIOS = {
    "buckets": Scenario("towers", zero=zero()),
    "oversized": Scenario("chain", zero=zero(), oversized=(6, 14)),
    "no overlap": Scenario("towers", zero=zero(2, False)),
    "separate": Scenario("towers", zero=zero(2, contiguous_gradients=False)),
    "offload": Scenario("chain", zero=zero(2, offload_optimizer={"device": "cpu"})),
    "unjoined": Scenario("towers", zero=zero(2), backwards=3, unjoined=True),
    "window": Scenario("towers", zero=zero(2), backwards=3, window=True, unjoined=True),
    "stage 1": Scenario("towers", zero=zero(1), backwards=2, unjoined=True),
    "stage 3": Scenario("towers", streams=3, zero=zero(3)),
    "stage 3 window": Scenario("towers", zero=zero(3), backwards=3, window=True, unjoined=True),
}


@pytest.mark.sampled(otherwise="every_cell")
@pytest.mark.parametrize("name", SCENARIOS)
def test_streams(ranks: OtherRanks, name: str) -> None:
    for races, _, kernels in ranks.run(run_ours, SCENARIOS[name], 2, None, 2):
        assert kernels > 100
        assert not races, "\n".join(races)


def _stock_races(scenario: Scenario) -> list[tuple[str, str, str]]:
    races = run(scenario, stock).races
    return [
        (race.buffer.split()[0], race.first.location.split()[-1], race.second.location.split()[-1]) for race in races
    ]


@pytest.mark.parametrize("model", ["chain", "towers"])
def test_upstream_races_where_we_do_not(ranks_of: Callable[[str], RankPool], model: str) -> None:
    """0.19.3 fixed one race, in which the reduction of a bucket waits for the current stream only."""
    ranks = ranks_of("0.19.2")
    single, several = (ranks.run(_stock_races, Scenario(model, streams, zero=zero())) for streams in (1, 2))
    assert single == [[], []]
    for races in several:
        assert ("ipg", "reduce_independent_p_g_buckets_and_remove_grads", "average_tensor") in races


def _resume(directory: str, stage: int, precision: str) -> bool:
    """Whether two epochs are the same with and without a checkpoint between them."""
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.support.training import Classifier, fit, weights, zero_plus

    through = weights(fit(zero_plus(stage), Classifier(optimizer="adamw"), precision=precision))
    saving = ModelCheckpoint(directory, every_n_epochs=1, save_last=True)
    settings = {"precision": precision, "callbacks": [saving], "enable_checkpointing": True}
    fit(zero_plus(stage), Classifier(optimizer="adamw"), max_epochs=1, **settings)
    last = str(Path(directory, "last.ckpt"))
    resumed = fit(zero_plus(stage), Classifier(optimizer="adamw"), precision=precision, ckpt_path=last)
    return torch.equal(weights(resumed), through)


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-true", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("stage", STAGES)
def test_resume(ranks: OtherRanks, tmp_path: Path, stage: int, precision: str) -> None:
    assert ranks.run(_resume, str(tmp_path), stage, precision) == [True, True]


def _gathered_weights_are_there() -> bool:
    import torch
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters
    from torch import nn

    from tests.support.training import Classifier, fit, zero_plus

    class Uneven(Classifier):
        """The last weight is gathered long before the first: gloo works on two at a time."""

        def on_train_start(self) -> None:
            weights = [self.large, self.small]
            self.seen = []
            for _ in range(10):
                with GatheredParameters(weights):
                    self.seen.append(all(torch.equal(weight, torch.ones_like(weight)) for weight in weights))

    module = Uneven()
    module.large, module.small = nn.Parameter(torch.ones(2**23)), nn.Parameter(torch.ones(2))
    fit(zero_plus(3), module, max_steps=1)
    return all(module.seen)


def test_gathered_weights_are_there(ranks: OtherRanks) -> None:
    """Upstream waits for the last of its all-gathers only: the large one was garbage."""
    assert ranks.run(_gathered_weights_are_there) == [True, True]


def _nested_failure(stage: int) -> bool:
    """Whether a backward that raises, and is caught, leaves the engine as it was."""
    import deepspeed
    import torch
    from torch import nn

    from lightning_zeroplus.engine.build import build_engine
    from tests.testing.streams.scenarios import config

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    settings = config(Scenario(zero=zero(stage, False))) | {"gradient_clipping": 0.0}  # newer releases clip by default
    engine = build_engine(net, torch.optim.SGD(net.parameters(), 0.1), settings)
    x = torch.ones(2, 4)

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError

    y = engine(x)
    y.register_hook(fail)
    try:
        engine.backward(y.sum())
    except ArithmeticError:
        engine.optimizer.zero_grad()
    # Else the next direct backward would not be told from one of the engine: in fp16, its loss was not scaled.
    assert not engine._running_engine_backward
    before = net.bias.detach().clone()
    engine(x).sum().backward()  # a direct one: the engine has to see that it runs none itself
    engine.step()
    engine.destroy()
    return torch.equal(net.bias, before - 0.1 * 2)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_direct_backward_after_one_that_failed(ranks: OtherRanks, stage: int) -> None:
    assert ranks.run(_nested_failure, stage) == [True, True]


def _compile() -> str:
    from tests.support.training import fit, zero_plus

    try:
        fit(zero_plus(3, compile=True))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_compile_is_refused(ranks_of: Callable[[str], RankPool]) -> None:
    for message in ranks_of("0.18.9").run(_compile):
        assert message.startswith("UnsupportedDeepSpeedError: DeepSpeed 0.18.9 is not supported: it has no DeepCompile")
