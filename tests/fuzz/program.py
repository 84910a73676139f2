"""A random program: a network, an optimizer, a training step, and how the strategy under test is set up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tests.fuzz.model import Model, Net
from tests.fuzz.statements import Backward, Clip, Loss, Statement, Window
from tests.fuzz.touches import Edit, Write

#: A large eps: where a gradient is zero but for rounding, Adam would make an update of full size of it.
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, 0.05),
    "momentum": lambda groups: torch.optim.SGD(groups, 0.05, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda groups: torch.optim.SGD(groups, 0.05, momentum=0.8, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, 0.02, eps=1e-2, weight_decay=0.2),
    "amsgrad": lambda groups: torch.optim.Adam(groups, 0.02, eps=1e-2, amsgrad=True, weight_decay=0.1),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, 0.05, eps=1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, 0.02, eps=1e-2, momentum=0.5, weight_decay=0.1),
}


@dataclass(frozen=True)
class Program:
    """What is run under a strategy, and by the reference."""

    seed: int
    model: Model
    optimizer: str
    #: Heads in a group of their own, with another rate and decay.
    grouped: bool
    scheduled: bool
    batches: int
    #: Run before the forward of each batch, in ``on_train_batch_start``.
    before: tuple[Statement, ...]
    body: tuple[Statement, ...]
    #: Elements of a reduction bucket.
    bucket: int = 100
    #: ``stage3_param_persistence_threshold``.
    threshold: int = 0
    overlap: bool = False
    #: The layers are the LightningModule's own; a network that is none of its modules calls them.
    spread: bool = False

    def __str__(self) -> str:
        groups = ", heads in a group of their own" * self.grouped
        schedule = ", lr / (1 + step)" * self.scheduled
        spread = ", layers of the LightningModule" * self.spread
        lines = [
            f"seed {self.seed}: {self.batches} batches, {self.optimizer}{groups}{schedule}{spread}",
            f"reduce_bucket_size={self.bucket}, stage3_param_persistence_threshold={self.threshold},"
            f" overlap_comm={self.overlap}",
            str(self.model),
        ]
        for name, statements in (("on_train_batch_start", self.before), ("training_step", self.body)):
            lines += [f"{name}:", *(f"  {line}" for each in statements for line in each.lines())] if statements else []
        return "\n".join(lines)

    def under(self, strategy: str) -> Program:
        """What of this program ``strategy`` can run, and a single process shows."""
        body = tuple(_without_local_edits(_kept(self.body, strategy)))
        made = replace(self, before=_kept(self.before, strategy), body=body)
        # A rank whose head is frozen, on a hidden layer that is detached, has nothing to differentiate.
        freezes = any("requires_grad_" in line for each in (*self.before, *self.body) for line in each.lines())
        return replace(made, body=_on_the_same_heads(made.body)) if freezes else made

    def groups(self, net: Net) -> list[dict[str, Any]]:
        """Parameter groups."""
        if not self.grouped:
            return [{"params": list(net.parameters())}]
        heads: list[nn.Parameter] = list(net.heads.parameters())
        return [{"params": list(net.layers.parameters())}, {"params": heads, "lr": 0.03, "weight_decay": 0.05}]

    def make_optimizer(self, net: Net) -> Any:
        """The optimizer over all parameters of ``net``."""
        return OPTIMIZERS[self.optimizer](self.groups(net))

    def make_scheduler(self, optimizer: Any) -> Any:
        """A schedule, or None."""
        if not self.scheduled:
            return None
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _kept(statements: Iterable[Statement], strategy: str) -> tuple[Statement, ...]:
    return tuple(_keep(statements, strategy))


def _without_local_edits(statements: Iterable[Statement]) -> Iterator[Statement]:
    """Without edits and clips of gradients after ``no_sync``, until a backward outside: they are each rank's own."""
    are_local = False
    for each in statements:
        if isinstance(each, (Backward, Window)):
            are_local = (each.at is not None and are_local) or getattr(each, "kind", "") == "no_sync"
        if not (are_local and isinstance(each, (Edit, Clip))):
            yield each


def _on_the_same_heads(statements: Iterable[Statement]) -> tuple[Statement, ...]:
    return tuple(
        replace(each, body=_on_the_same_heads(each.body))
        if isinstance(each, Window)
        else replace(each, by_rank=None if each.detached else each.by_rank)
        if isinstance(each, Loss)
        else each
        for each in statements
    )


def _keep(statements: Iterable[Statement], strategy: str) -> Iterator[Statement]:
    for statement in statements:
        if isinstance(statement, Window):
            yield replace(statement, body=_kept(statement.body, strategy))
        elif not isinstance(statement, Write) or _allows_writes(strategy):
            yield statement


def _allows_writes(strategy: str) -> bool:
    """Whether weights can be written: partitioned ones within ``zp.gathered`` only."""
    import lightning_zeroplus as zp

    return not strategy.startswith("stage3") or hasattr(zp, "gathered")
