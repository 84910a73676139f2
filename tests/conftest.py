"""Ranks for all tests, started once; the count of the gradient matrix."""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn import functional

os.environ.setdefault("OMP_NUM_THREADS", "1")

from lightning_zeroplus.engine.upstream.jit_locks import find_locks, remove_stale_locks
from lightning_zeroplus.internals.extensions import choose_extensions_folder
from lightning_zeroplus.testing import RankPool
from tests.support.forkserver import fork_server
from tests.support.turns import draw

if TYPE_CHECKING:
    from tests.programs.cell import Cells

choose_extensions_folder()  # some tests use DeepSpeed itself, or the simulated device, before a strategy does


def quiet() -> None:
    """Keep Lightning's and DeepSpeed's reports of hundreds of small trainings out of the output."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_utilities", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def settle() -> None:
    """What a rank does first: it keeps quiet, and to one core, where it is woken sooner after a collective."""
    from lightning.fabric.utilities import registry

    from tests.support import objects

    objects.register()  # a test may pass nothing but an address
    quiet()
    # For each Trainer, Lightning reads the metadata of all installed packages, to look for callbacks.
    registry.entry_points = functools.cache(registry.entry_points)
    cores = sorted(os.sched_getaffinity(0))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = max(len(cores) // workers, 1)  # ranks of different workers do not wait for each other
    core = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) * share + int(os.environ["RANK"]) % share
    os.sched_setaffinity(0, {cores[core % len(cores)]})


class Ranks(RankPool):
    """Ranks on which a garbage collection looks only at what the test itself has made.

    DeepSpeed collects several times when it builds an engine, and all that has been imported since the ranks started
    would cost up to a tenth of a second each time.
    """

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        return super().run(_then_freeze, function, *args, timeout=timeout)


def _then_freeze(function: Callable[..., Any], *args: Any) -> Any:
    result = function(*args)
    _end_meshes()
    _release_dropped_engines()
    _put_torchs_linear_back()
    gc.collect()  # what is garbage now would stay for ever
    gc.freeze()
    return result


def _release_dropped_engines() -> None:
    """As the next engine would: the tests of Fabric, and of engines alone, close none."""
    received = sys.modules.get("lightning_zeroplus.engine.hooks.received")
    if received is not None:  # not imported where no engine was built
        received.release_dropped()


def _put_torchs_linear_back() -> None:
    """A test that uses DeepSpeed itself leaves DeepSpeed's linear layer in torch's place, for all that follow."""
    if functional.linear.__module__.startswith("deepspeed."):
        functional.linear = torch._C._nn.linear


def _end_meshes() -> None:
    """Destroy the process groups of device meshes: Lightning makes new ones for each fit, and nobody ends them.

    Each has threads of its own; after hundreds of fits they would slow down all others.
    """
    groups = list(distributed_c10d._world.pg_map) if distributed_c10d.is_initialized() else []
    ended = [
        group
        for group in groups
        if group is not distributed_c10d.GroupMember.WORLD and group.group_desc.startswith("mesh")
    ]
    for group in ended:
        distributed_c10d.destroy_process_group(group)
    if ended:
        # DTensor caches results with their mesh. A later mesh is equal to it, but has other groups.
        _clear_sharding_prop_cache()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(world_size)``: the session's pool of that size."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        remove_stale_locks(find_locks())  # of ranks that were killed while they built an operator
        if world_size not in pools:
            pools[world_size] = Ranks(world_size, timeout=90, initializer=settle, mp_context=fork_server())
        return pools[world_size]

    yield pool
    for each in pools.values():
        each.close()


@pytest.fixture
def ranks2(ranks: Callable[[int], RankPool]) -> RankPool:
    """Two ranks."""
    return ranks(2)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    """Runs programs, with the references of one file's programs trained once."""
    from tests.programs.cell import Cells  # only where it is needed: it imports Lightning

    return Cells(tmp_path_factory.mktemp("programs"))


#: What is left out with ``--thorough``, and without.
_MARKERS = {"every_cell": ("every_cell",), "thorough": ("every_cell", "thorough", "slow")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also run what is slow or repeats other tests")
    parser.addoption("--every-cell", action="store_true", help="--thorough, and everything under every setting")


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_what_is_not_drawn(items)
    if config.getoption("--every-cell"):
        return
    without = _MARKERS["every_cell" if config.getoption("--thorough") else "thorough"]
    left = {item for item in items if _left_out(item, without)}
    if left:
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]


def _mark_what_is_not_drawn(items: list[pytest.Item]) -> None:
    """Mark the cases of tests marked ``sampled`` that are not in the sample."""
    tests: dict[tuple[str, int | None, str], dict[str, pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("sampled")
        otherwise = marker.kwargs.get("otherwise", "thorough") if marker else ""
        if marker and hasattr(item, "callspec") and not _left_out(item, _MARKERS[otherwise]):
            test = (item.nodeid.partition("[")[0], marker.kwargs.get("every"), otherwise)
            tests.setdefault(test, {})[item.nodeid] = item
    for (_, every, otherwise), cases in tests.items():
        drawn = draw({name: case.callspec.params for name, case in cases.items()}, every)
        for name in cases.keys() - drawn:
            cases[name].add_marker(otherwise)


def _left_out(item: pytest.Item, markers: tuple[str, ...]) -> bool:
    return any(item.get_closest_marker(name) for name in markers)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many cells of the gradient matrix were run."""
    outcomes = ("passed", "failed", "skipped")
    cells = {
        outcome: sum("matrix" in getattr(report, "keywords", {}) for report in terminalreporter.stats.get(outcome, []))
        for outcome in outcomes
    }
    if any(cells.values()):
        counts = ", ".join(f"{count} {outcome}" for outcome, count in cells.items() if count)
        terminalreporter.write_line(f"gradient matrix: {sum(cells.values())} cells ({counts})")
