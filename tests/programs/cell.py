"""One program under one strategy, on the ranks of a pool, compared with its reference."""

from __future__ import annotations

import hashlib
import importlib
import re
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zeroplus.testing import RankError, RankPool
from lightning_zeroplus.testing.simulated_cuda import Log, record
from tests.programs.comparison import BOUNDS, Result, differences, still, tensor_error
from tests.programs.program import Program, Refusal, programs
from tests.programs.run import Run, prepare, still_cut, without_other_ranks
from tests.support.training import accelerator

#: Seconds that a cell may take. A rank that waits for another longer than this hangs.
LIMIT_S = 30.0
_LONGEST_START_S = 120.0


class Outcome(NamedTuple):
    """What became of a cell."""

    #: ``equal``, ``refused``, or what is wrong.
    verdict: str
    #: The refusal's message, or all that is wrong.
    details: str
    seconds: float

    @property
    def right(self) -> bool:
        """Whether it is what the program expects."""
        return self.verdict in ("equal", "refused")


class Cells:
    """Runs cells on a pool, with every reference trained once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._references: set[tuple[str, int]] = set()

    def run(self, pool: RankPool, program: Program, strategy: str, references: RankPool | None = None) -> Outcome:
        """Run ``program`` under ``strategy``; an error, a hang and a crash are outcomes, too.

        Args:
            pool: The ranks.
            program: The program.
            strategy: The name of a column.
            references: Ranks that train the program's reference, as many; None: ``pool``.
        """
        references = references or pool
        for each in (pool, references):
            each.run(_import, program.imports, timeout=_LONGEST_START_S)  # starts ranks, where there are none
        start = time.monotonic()
        if (program.name, pool.world_size) not in self._references:
            references.run(train_reference, program.name, str(self.folder), timeout=LIMIT_S)
            self._references.add((program.name, pool.world_size))
            start = time.monotonic()
        try:
            fates = pool.run(run_cell, program.name, strategy, str(self.folder), timeout=LIMIT_S)
        except RankError as error:
            verdict = "hangs" if "raised\n" not in str(error) and "died" not in str(error) else "fails"
            return Outcome(verdict, str(error), time.monotonic() - start)
        outcome = Outcome(*judge(fates, program.refusal(strategy)), time.monotonic() - start)
        if any(fate.error_type for fate in fates):
            pool.close()  # what an exception has left behind is of no concern to the next cell
        return outcome


class Fate(NamedTuple):
    """What became of a cell on one rank."""

    #: Names of the classes of the exception, the most derived first.
    error_type: tuple[str, ...]
    message: str
    #: What is not equal; after an exception, in what was trained before it.
    differences: list[str]
    #: A hash of every trainable parameter, which must be the same on all ranks.
    digests: dict[str, str]


def judge(fates: list[Fate], refusal: Refusal | None) -> tuple[str, str]:
    """Verdict and details of what the ranks report."""
    wrong = [f"rank {rank}: {text}" for rank, fate in enumerate(fates) for text in fate.differences]
    if wrong:
        return "differs", "\n".join(wrong)
    apart = [name for name in fates[0].digests if len({fate.digests.get(name) for fate in fates}) > 1]
    if apart:
        return "differs", f"the ranks have different {', '.join(apart)}"
    if refusal is None:
        return "equal", ""
    raised = [fate for fate in fates if fate.error_type]
    if len(raised) < len(fates):
        return "differs", "is not refused"
    for fate in raised:
        if not {*refusal.type.split("|")} & {*fate.error_type} or not re.search(refusal.says, fate.message):
            return "fails", f"raises another error than {refusal}: {fate.error_type[0]}: {fate.message}"
    return "refused", f"{fates[0].error_type[0]}: {fates[0].message}"


def train_reference(name: str, folder: str) -> None:
    """Run the program as it is right, and leave the result in a file of this rank."""
    program = programs()[name]
    run = Run(program.reference, program.reference_precision, _fresh_folder(Path(folder), name, "reference"))
    prepare(run.precision)
    if run.alone:
        with without_other_ranks():
            program.run(run)
    else:
        program.run(run)
    result = collect(run)
    frozen = still(result, program.stays)
    assert not frozen, f"{frozen} did not move: the program shows nothing of them"
    torch.save(result, _reference_file(folder, name))


def run_cell(name: str, strategy: str, folder: str) -> Fate:
    """Run the program under ``strategy``, and compare.

    Raises:
        Exception: Of the program, where none is expected.
    """
    program = programs()[name]
    want: Result = torch.load(_reference_file(folder, name), weights_only=False)
    run = Run(strategy, program.precision, _fresh_folder(Path(folder), name, strategy))
    refusal = program.refusal(strategy)
    run.watch.snapshots = refusal is not None
    prepare(run.precision)
    kind = program.precision.partition("-")[0]
    alike = program.is_mixed and accelerator() == "cpu"  # kernels of a device round to 16 bits in their own way
    bound = BOUNDS["mixed" if alike else kind] if program.bound is None else program.bound
    log = None
    try:
        with _logged() as log:
            program.run(run)
        result = collect(run)
    except Exception as error:
        if refusal is None:
            raise
        names = tuple(cls.__name__ for cls in type(error).__mro__)
        return Fate(names, str(error), _trained_wrongly(run, want, bound), {})
    low = kind in ("bf16", "16") and not alike
    of_updates = program.bound_of_updates if dist.get_world_size() > 2 else None
    found = differences(result, want, bound, low, program.unmeasured, of_updates)
    found += [f"{name} is no ordinary parameter after the fit" for name in still_cut(run)]
    found += [] if log is None else [f"a race: {race}" for race in log.races()]
    return Fate((), "", found, {key: _digest(result.state[f"0.{key}"]) for key in want.trainable})


def collect(run: Run) -> Result:
    """All that is compared of a program that has ended."""
    states = [run.state(module) for module in run.modules]
    first = run.modules[0] if run.modules else None
    return Result(
        state={f"{index}.{name}": tensor for index, state in enumerate(states) for name, tensor in state.items()},
        trainable=[name for name, param in first.named_parameters() if param.requires_grad] if first else [],
        start=run.watch.start or {},
        after_batch=run.watch.after_batch,
        kept=run.kept,
        # A reference that runs alone logs on every rank.
        logged=[getattr(trainer.logger, "logged", []) if dist.get_rank() == 0 else [] for trainer in run.trainers],
        metrics=[
            {name: float(value) for name, value in (trainer.logged_metrics | trainer.callback_metrics).items()}
            for trainer in run.trainers
        ],
        steps=[trainer.global_step for trainer in run.trainers],
    )


def _logged() -> AbstractContextManager[Log | None]:
    """On the simulated device: what it does, to be searched for races."""
    return record(locations=True) if accelerator() == "cuda" and torch.version.cuda is None else nullcontext()


def _trained_wrongly(run: Run, want: Result, bound: float) -> list[str]:
    """Batches before an exception after which the weights were not the reference's."""
    found = []
    for index, (got, right) in enumerate(zip(run.watch.after_batch, want.after_batch, strict=False)):
        wrong = [name for name in right if name not in got or not _same(got, right, name, bound)]
        found += [f"after batch {index}, before the refusal: {name}" for name in wrong]
    return found


def _same(got: Mapping[str, Tensor], want: Mapping[str, Tensor], name: str, bound: float) -> bool:
    return got[name].shape == want[name].shape and tensor_error(got[name], want[name]) <= bound


def _digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def _reference_file(folder: str, name: str) -> Path:
    return Path(folder, f"{name}-{dist.get_world_size()}-{dist.get_rank()}.pt")


def _fresh_folder(folder: Path, name: str, strategy: str) -> Path:
    fresh = folder / f"{name}-{strategy}-{dist.get_world_size()}"
    fresh.mkdir(parents=True, exist_ok=True)
    return fresh


def _import(modules: tuple[str, ...]) -> None:
    for module in modules:
        importlib.import_module(module)
