"""Weights are read and written as under DDP, or access to them raises."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

import lightning_zeroplus as zp
from lightning_zeroplus.testing import RankPool
from lightning_zeroplus.weights import agreement
from lightning_zeroplus.weights.partitioned.partition import is_whole
from tests.weights import loops, programs
from tests.weights.programs import largest_difference, outcome, run

EVERYWHERE = ("Plain", "LoadBetween", "ByHand", "Copies", "Average", "AverageInside")
WRITES = ("Clamp", "Rebind", "Nested", "Raises", "OneWriter")
#: At stages 1 and 2 what is written during a fit is the engine's, not this room's.
CELLS = [
    *((strategy, loop) for strategy in ("3", "3 persistent", "fsdp") for loop in (*EVERYWHERE, *WRITES)),
    *(
        (strategy, loop)
        for strategy in ("3", "3 persistent")
        for loop in ("Initialize", "LoadState", "Penalty", "Late")
    ),
    *(("2", loop) for loop in ("Plain", "LoadBetween", "ByHand", "Average")),
]


def _run_all(cells: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    assert loops.Plain is programs.LOOPS["Plain"]
    return {cell: run(*cell) for cell in cells}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, ranks: Callable[[int], RankPool]) -> dict[tuple[str, str], Any]:
    """Rank 0's results, of the cells that are asked for in this session."""
    here: list[Any] = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in here if item.originalname == "test_equal_to_ddp"]
    cells = [(each["strategy"], each["loop"]) for each in params]
    reference = [("ddp", loop) for loop in dict.fromkeys(("Plain", *(loop for _, loop in cells)))]
    return ranks(2).run(_run_all, [*reference, *cells], timeout=500)[0]


@pytest.mark.sampled
@pytest.mark.parametrize(("strategy", "loop"), CELLS)
def test_equal_to_ddp(found: dict[tuple[str, str], Any], strategy: str, loop: str) -> None:
    """To the bit: the arithmetic is the same."""
    weights, seen = found[strategy, loop]
    reference, expected = found["ddp", loop]
    assert largest_difference(weights, reference) == 0
    assert seen == expected
    start = programs.state(programs.LOOPS["Plain"]())
    assert largest_difference(weights, start) > 0.01
    if loop not in ("Plain", "Copies"):
        assert largest_difference(weights, found["ddp", "Plain"][0]) > 0.01  # the loop has an effect


def _refusals(strategy: str, names: list[str]) -> list[str]:
    assert loops.Plain is programs.LOOPS["Plain"]
    return [outcome(strategy, name) for name in names]


@pytest.mark.parametrize("strategy", ["3", "3 persistent"])
def test_what_cannot_be_is_refused_on_all_ranks(ranks2: RankPool, strategy: str) -> None:
    for step, differ, shape in ranks2.run(_refusals, strategy, ["Step", "Differ", "BadShape"]):
        assert "optimizer.step() within zp.gathered()" in step
        assert differ.startswith("RuntimeError: The ranks have written different values")
        assert shape.startswith("ValueError: The parameter 'student.3.weight' was given the shape (2,)")


def test_fsdp_refuses_on_all_ranks(ranks2: RankPool) -> None:
    (differ, told), (other, shape) = ranks2.run(_refusals, "fsdp", ["Differ", "BadShape"])
    assert differ == other
    assert differ.startswith("RuntimeError: The ranks have written different values")
    assert shape.startswith("ValueError: `param.data = ...` with the shape (2,)")
    assert "Another rank has raised an error" in told


def _differ(strategy: str) -> dict[str, Any]:
    return programs.fit(strategy, loops.DifferAndGoOn()).seen


@pytest.mark.parametrize("strategy", ["3", "fsdp"])
def test_values_from_before_are_there_after_ranks_have_differed(ranks2: RankPool, strategy: str) -> None:
    for rank, seen in enumerate(ranks2.run(_differ, strategy)):
        assert seen == {"written": pytest.approx((1 + rank) ** 2), "reverted": True}


def _touch(strategy: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    module = programs.fit(strategy, loops.Touch())
    return module.seen, programs.state(module)


def test_a_partitioned_weight_is_gathered_for_whoever_needs_it(ranks2: RankPool) -> None:
    (reference, wanted), (seen, weights) = ranks2.run(_touch, "ddp")[0], ranks2.run(_touch, "3")[0]
    for name in loops.TOUCHES | loops.ASKS:
        assert seen[name] == reference[name], name
    assert largest_difference(weights, wanted) == 0
    assert "'student.0.weight'" in seen["half"] and "Trainer(precision=...)" in seen["half"]
    assert "'student.0.weight', partitioned" in seen["text"]


def _alone() -> str:
    from datetime import timedelta

    from torch.distributed import distributed_c10d

    net = nn.Linear(2, 2)
    group = distributed_c10d._get_default_group()
    limit = group._get_backend(torch.device("cpu")).options._timeout
    distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    try:
        if torch.distributed.get_rank() == 0:
            with zp.gathered(net, writer=0):
                pass
        return ""
    except RuntimeError as error:
        return str(error)
    finally:
        distributed_c10d._set_pg_timeout(limit, group)


def test_a_rank_that_comes_alone_is_told(ranks2: RankPool) -> None:
    told, nothing = ranks2.run(_alone)
    assert "1 of 2 ranks have come here" in told
    assert not nothing


def test_in_a_plain_process() -> None:
    """Nothing to do, and the same program runs."""
    teacher, student = nn.Linear(3, 2), nn.Linear(3, 2)
    with (
        zp.gathered(teacher) as module,
        zp.gathered(student.weight) as weight,
        zp.gathered(student.parameters()) as all_,
    ):
        assert module is teacher
        assert weight is student.weight
        assert all_ == list(student.parameters())
    expected = {
        name: param.data.clone().mul_(0.9).add_(dict(student.named_parameters())[name].data, alpha=1 - 0.9)
        for name, param in teacher.named_parameters()
    }
    zp.ema_update(teacher, student, 0.9)
    assert all(torch.equal(param, expected[name]) for name, param in teacher.named_parameters())


@pytest.mark.parametrize("bad", [3, None, "weight", [torch.ones(2)], {"a": 1}])
def test_gathered_takes_modules_and_parameters(bad: Any) -> None:
    with pytest.raises(ValueError, match="a module, a parameter, or an iterable of parameters"), zp.gathered(bad):
        pass


@pytest.mark.parametrize("writer", [-1, 1, True, "0"])
def test_a_writer_is_a_rank(writer: Any) -> None:
    with pytest.raises(ValueError, match="give a rank from 0 to 0"), zp.gathered(nn.Linear(2, 2), writer=writer):
        pass


@pytest.mark.parametrize(
    ("teacher", "student", "decay", "said"),
    [
        (nn.Linear(2, 2), nn.Linear(2, 2), 1.5, "give a number from 0 to 1"),
        (nn.Linear(2, 2), nn.Linear(2, 2, bias=False), 0.5, "the student has no parameter 'bias'"),
        (nn.Linear(2, 2, bias=False), nn.Linear(2, 2), 0.5, "the teacher has no parameter 'bias'"),
        (nn.Linear(2, 2), nn.Linear(3, 2), 0.5, "'weight' is of shape"),
        (nn.Linear(2, 2), nn.Linear(2, 2).double(), 0.5, "'weight' is of shape"),
        (nn.Linear(2, 2).weight, nn.Linear(2, 2), 0.5, "takes two modules"),
    ],
)
def test_ema_update_compares_the_modules(teacher: Any, student: Any, decay: float, said: str) -> None:
    before = [param.clone() for param in getattr(teacher, "parameters", list)()]
    with pytest.raises(ValueError, match=said):
        zp.ema_update(teacher, student, decay)
    assert all(torch.equal(a, b) for a, b in zip(before, getattr(teacher, "parameters", list)(), strict=True))


class _Reads(programs.Program):
    """Notes how many weights are whole: after they were read, and in the next batch, where nobody reads them."""

    def before(self, index: int) -> None:
        params: list[Any] = list(self.student.parameters())
        if index == 0:
            self.seen["norm"] = sum(float(param.norm()) for param in params)
        self.seen[f"before {index}"] = sum(is_whole(param) for param in params)

    def training_step(self, batch: Any, index: int) -> Any:
        self.seen[f"in {index}"] = sum(is_whole(param) for param in self.student.parameters())
        return super().training_step(batch, index)


def _released() -> dict[str, Any]:
    return programs.fit("3", _Reads()).seen


def test_weights_that_were_read_are_released_with_the_next_batch(ranks2: RankPool) -> None:
    for seen in ranks2.run(_released):
        assert seen["before 0"] == seen["in 0"] > 0
        assert seen["before 1"] == seen["in 1"] == 0


def _device_of_two_backends() -> str:
    group = dist.new_group(backend="cpu:gloo,cuda:gloo")
    try:
        with patch.object(distributed_c10d, "_get_default_group", lambda: group), warnings.catch_warnings():
            warnings.simplefilter("error")
            return agreement.device().type
    finally:
        dist.barrier()  # the other rank may still be joining the second backend
        dist.destroy_process_group(group)


def test_a_group_of_two_backends_agrees_on_the_cpu_without_a_warning(ranks2: RankPool) -> None:
    assert ranks2.run(_device_of_two_backends) == ["cpu", "cpu"]
