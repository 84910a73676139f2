"""What a program is, and the list of all of them.

A program is a small but whole use of the Trainer, written as a user writes it. It knows nothing of our strategies: the
same code runs under DDP, which says what is right.
"""

from __future__ import annotations

import fnmatch
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import lightning.pytorch as pl

if TYPE_CHECKING:
    from tests.programs.run import Run

#: The columns of the table: every program runs under each of them.
STRATEGIES = (
    *("stage0", "stage1", "stage2", "stage2_step", "stage2_offload"),
    *("stage3", "stage3_step", "stage3_offload", "stage3_large", "stage3_mixed"),
    *("fsdp", "fsdp_step", "fsdp_wrap"),
)
#: For programs that ask for it by ``also``: compilation with the backend "eager".
COMPILE = ("stage1_compile", "stage2_compile", "stage3_compile")
#: The modules whose programs are run, in the order of the table.
FAMILIES = (
    "ordinary",
    "manual_loops",
    "ranks",
    "derivatives",
    "gradients",
    "unreduced",
    "kept_gradients",
    "weights",
    "kept_views",
    "graph_views",
    "optimizers",
    "optimizer_states",
    "replaced_optimizers",
    "whole_tensors",
    "several_optimizers",
    "shared_parameters",
    "callbacks",
    "modules",
    "more_modules",
    "own_parameters",
    "buffers",
    "begins",
    "everyday",
    "torch_tools",
    "precision",
    "mixed",
    "tools",
    "lifecycle",
    "stopped",
    "one_file",
    "saves",
    "frozen",
    "wrapped",
    "averages",
    "norms",
    "not_finite",
    "own_steps",
    "hugging_face",
    "adapters",
    "fabric",
    "fabric_modules",
    "fabric_models",
    "fabric_files",
    "habits",
    "clipping",
    "late_changes",
    "papers",
    "contrastive",
    "step_hooks",
    "kept_parameters",
    "outside",
    "fabric_loops",
    "own_kernels",
    "packages",
    "gathered",
    "hooked",
    "in_backwards",
    "shared_memory",
    "watched",
    "own_forwards",
    "containers",
    "identities",
    "evaluations",
)


class Refusal(NamedTuple):
    """A program that a strategy cannot run: what it must raise, before anything has been trained wrongly."""

    #: Name of the exception's class or of one of its bases, or some with ``|``.
    type: str
    #: A regular expression that the message contains: what to do instead.
    says: str


@dataclass(frozen=True)
class Program:
    """A program, what it must equal, and where it is refused instead."""

    name: str
    family: str
    #: One line for the table.
    what: str
    #: Runs it, with all that is compared going through its argument.
    run: Callable[[Run], None]
    #: ``ddp`` and ``ddp_find_unused_parameters_true`` are Lightning's. ``single`` is one process, without a strategy,
    #: that sees the batches of all ranks as one: for what DDP itself gets wrong.
    reference: str = "ddp"
    #: Refusals by pattern of the strategies' names; the first that matches counts.
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    #: Further strategies, which are not in `STRATEGIES`.
    also: tuple[str, ...] = ()
    #: Patterns of the strategies under which it does not run: where it would be about nothing.
    without: tuple[str, ...] = ()
    precision: str = "32-true"
    reference_precision: str = "32-true"
    #: Largest error, see `tests.programs.comparison`; None: that of the precision.
    bound: float | None = None
    #: Largest error of all updates together on more than two ranks, whose sums depend on the order; None: `bound`.
    bound_of_updates: float | None = None
    #: Patterns of the names of trainable parameters that may stay where they are.
    stays: tuple[str, ...] = ()
    #: Patterns of the names of metrics that are not compared, as times are.
    unmeasured: tuple[str, ...] = ()
    #: Modules whose import takes long: they are imported before the time of a cell begins.
    imports: tuple[str, ...] = ()
    #: Whether it is one of those that run on three ranks, too.
    on_three_ranks: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether it is compared with its reference in the same mixed precision, whose weights are fp32."""
        return self.precision == self.reference_precision and self.precision.endswith("-mixed")

    @property
    def strategies(self) -> tuple[str, ...]:
        """The strategies under which it runs."""
        return tuple(name for name in (*STRATEGIES, *self.also) if not _matches(name, self.without))

    def refusal(self, strategy: str) -> Refusal | None:
        """What it must raise under ``strategy``; None: it must be equal."""
        return next((refusal for pattern, refusal in self.refused.items() if _matches(strategy, (pattern,))), None)


_PROGRAMS: dict[str, Program] = {}
_Made = TypeVar("_Made", bound=Callable[..., Any])


def program(trainer: Mapping[str, Any] | None = None, **details: Any) -> Callable[[_Made], _Made]:
    """Make a program of a function that is given a :class:`~tests.programs.run.Run`, or of a LightningModule.

    A LightningModule is fitted once. Its name and the first line of its docstring are the program's.

    Args:
        trainer: What to give to the Trainer, for a LightningModule.
        **details: Fields of :class:`Program`.
    """

    def register(made: _Made) -> _Made:
        function: Callable[[Run], Any] = made
        if inspect.isclass(made) and issubclass(made, pl.LightningModule):
            function = lambda run: run.fit(made(), **(trainer or {}))  # noqa: E731
        assert made.__doc__, f"{made.__name__} needs a docstring"
        assert not {*details.get("also", ())} & {*STRATEGIES}, f"{made.__name__} runs under each of STRATEGIES anyway"
        assert made.__name__ not in _PROGRAMS, f"there are two programs {made.__name__}"
        family = made.__module__.rpartition(".")[2]
        what = " ".join(made.__doc__.split("\n\n")[0].split())
        _PROGRAMS[made.__name__] = Program(made.__name__, family, what, function, **details)
        return made

    return register


def programs() -> dict[str, Program]:
    """All programs by name, in the order of the table."""
    for family in FAMILIES:
        importlib.import_module(f"tests.programs.families.{family}")
    return dict(sorted(_PROGRAMS.items(), key=lambda item: FAMILIES.index(item[1].family)))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
