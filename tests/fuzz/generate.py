"""Random programs, each from an integer."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.fuzz.model import KINDS, Layer, Model
from tests.fuzz.program import OPTIMIZERS, Program
from tests.fuzz.statements import (
    Backward,
    Clip,
    Loss,
    Rate,
    Schedule,
    Statement,
    Statistic,
    Step,
    Trunk,
    Window,
    Zero,
)
from tests.fuzz.touches import Edit, Freeze, Write

_EDITS = ("read", "read", "scale", "assign", "noise", "center", "data", "none")
_WRITES = ("in place", "data", "assign", "load", "init")
_LOSSES = ("mse", "mse", "smooth", "square", "vector", "penalty", "nested")


def generate(seed: int) -> Program:
    """The program of this seed; it is the same everywhere."""
    return _Generator(Random(seed)).program(seed)


class _Generator:
    def __init__(self, random: Random) -> None:
        self.random = random
        # Up to eight: what came often is expected of a rank, also when it does something else.
        self.count = random.randint(3, 5) + random.choice([0, 0, 0, 3])
        self.model = self._model()
        #: How many batches there are per step.
        self.across = random.choice([1, 1, 1, 2])
        self.steps = tuple(i for i in range(self.count) if (i + 1) % self.across == 0)
        self.firsts = tuple(i for i in range(self.count) if i % self.across == 0)
        self.recomputes = any(layer.recomputed for layer in self.model.layers)
        self.reentrant = any(layer.recomputed == "reentrant" for layer in self.model.layers)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def program(self, seed: int) -> Program:
        random = self.random
        grouped, scheduled = self.chance(0.3), self.chance(0.3)
        return Program(
            seed=seed,
            model=self.model,
            optimizer=random.choice(list(OPTIMIZERS)),
            grouped=grouped,
            scheduled=scheduled,
            batches=self.count,
            before=self._before(),
            body=self._body(scheduled),
            bucket=random.choice([20, 60, 100, 10**6]),
            threshold=random.choice([0, 0, 6]),
            overlap=self.chance(0.25),
            spread=Random(-seed - 1).random() < 0.3,  # what came later changes no program of before
        )

    def _model(self) -> Model:
        layers = [Layer("linear")]
        for _ in range(self.random.randint(0, 3)):
            kind = self.random.choice(KINDS)
            # A BatchNorm that runs twice would count its batch twice.
            recomputes = self.chance(0.25) and kind != "batchnorm"
            recomputed = self.random.choice(["reentrant", "plain"]) if recomputes else None
            layers.append(Layer(kind, recomputed, frozen=self.chance(0.2)))
        frozen_tie = any(layer.kind == "tied" and layer.frozen for layer in layers)
        hook = self.chance(0.1) and not frozen_tie
        return Model(self.random.randrange(1000), tuple(layers), self.random.randint(1, 3), hook)

    def _before(self) -> tuple[Statement, ...]:
        statements: list[Statement] = []
        for index, layer in enumerate(self.model.layers):
            if layer.frozen and self.chance(0.5):
                statements.append(Freeze(f"layers.{index}", True, at=(self.random.randrange(1, self.count),)))
        if self.chance(0.2):
            name, (off, on) = self._module(), sorted(self.random.sample(range(self.count), 2))
            statements += [Freeze(name, False, at=(off,)), Freeze(name, True, at=(on,))]
        if self.chance(0.15):
            statements.append(self._write(self._some_batches()))
        return tuple(statements)

    def _body(self, scheduled: bool) -> tuple[Statement, ...]:
        zero = Zero(self.random.choice(["optimizer", "optimizer", "module", "children", "none"]))
        before = self.chance(0.4)
        body: list[Statement] = [replace(zero, at=self._when(self.firsts))] if before else []
        body += self._backwards()
        if self.chance(0.15):
            body += self._frozen_late()
        if self.chance(0.1):
            body.append(self._write(self._some_batches()))
        body += self._touches()
        dropped = {self.random.choice(self.steps)} if self.chance(0.15) and len(self.steps) > 1 else set()
        body.append(Step(at=self._when(tuple(i for i in self.steps if i not in dropped))))
        if not before:
            body.append(replace(zero, at=self._when(self.steps)))
        if scheduled:
            body.append(Schedule(at=self._when(self.steps)))
        if self.chance(0.1):
            body.append(Rate(0.5, at=self._some_batches()))
        if self.chance(0.25):
            body.append(self._write(self._some_batches()))
        return tuple(body)

    def _when(self, indices: tuple[int, ...]) -> tuple[int, ...] | None:
        return None if len(indices) == self.count else indices

    def _some_batches(self) -> tuple[int, ...]:
        return tuple(sorted(self.random.sample(range(self.count), self.random.randint(1, self.count - 1))))

    def _module(self) -> str:
        """Not the first layer, so that every loss has a gradient."""
        return self.random.choice(self.model.names()[1:])

    # -- backwards -----------------------------------------------------------------------------------------------

    def _backwards(self) -> list[Statement]:
        number = self.random.choice([1, 1, 2, 2, 3, 4])
        shared = number > 1 and self.chance(0.35)
        losses = [self._loss(f"l{i}", "h" if shared and self.chance(0.8) else None) for i in range(number)]
        if self.chance(0.2):
            losses[-1] = replace(losses[-1], at=self._some_batches())
        lazy = shared or (number > 1 and self.chance(0.3))
        ordered = list(losses)
        if lazy and self.chance(0.5):
            self.random.shuffle(ordered)
        statements: list[Statement] = [Trunk("h")] if shared else []
        statements += losses if lazy else []
        pending = [[*([] if lazy else [loss]), self._backward(loss, shared)] for loss in ordered]
        return statements + self._windows(pending, lazy)

    def _loss(self, name: str, trunk: str | None) -> Loss:
        kind = self.random.choice(_LOSSES)
        if kind == "penalty" and (self.reentrant or trunk):
            kind = "mse"
        if kind == "nested" and (trunk or self.random.random() < 0.5):
            kind = "mse"
        plain = kind not in ("penalty", "nested")
        return Loss(
            name,
            kind,
            head=self.random.randrange(self.model.heads),
            of=trunk,
            half=self.random.choice([None, 0, 1]) if plain else None,
            detached=plain and self.chance(0.05),
            by_rank=self.random.choice([0, 0, self.count - 1]) if self.model.heads > 1 and self.chance(0.15) else None,
        )

    def _backward(self, loss: Loss, shared: bool) -> Statement:
        return Backward(loss.name, retain=shared and loss.of is not None, bare=self.chance(0.2), at=loss.at)

    def _windows(self, pending: list[list[Statement]], lazy: bool) -> list[Statement]:
        """Put some of the backwards into windows, and other statements between the windows."""
        statements: list[Statement] = []
        while pending:
            size = self.random.randint(1, len(pending))
            inner = [each for group in pending[:size] for each in group]
            pending = pending[size:]
            kind = self.random.choice(["coalesce", "backwards", "max_bytes", "no_sync"]) if self.chance(0.45) else None
            if kind is None:
                statements += inner
            elif kind == "backwards" and any(isinstance(each, Loss) and each.detached for each in inner):
                statements.append(Window("coalesce", tuple(inner)))
            else:
                statements.append(Window(kind, tuple(inner)))
            if pending:
                statements += self._between(lazy)
        return statements

    def _between(self, lazy: bool) -> list[Statement]:
        statements: list[Statement] = []
        if self.chance(0.25):
            statements.append(self._edit())
        if self.chance(0.1) and not self.reentrant:
            statements.append(Statistic())
        if self.chance(0.15) and not (lazy and self.recomputes):
            statements += self._frozen_late()
        return statements

    def _frozen_late(self) -> list[Statement]:
        """Freeze what may have a gradient already; for the rest of the fit, or until a later batch."""
        return [Freeze(self._module(), False, at=(self.random.randrange(self.count),))]

    # -- gradients and weights -----------------------------------------------------------------------------------

    def _touches(self) -> list[Statement]:
        statements: list[Statement] = []
        for _ in range(self.random.choice([0, 0, 1, 1, 2])):
            if self.chance(0.6):
                statements.append(self._edit())
            else:
                algorithm = self.random.choice(["norm", "norm", "value"])
                limit = 0.3 if algorithm == "norm" else 0.05
                statements.append(Clip(limit, algorithm, self.chance(0.5), at=self._when(self.steps)))
        if self.chance(0.1):
            statements.append(Zero(self.random.choice(["module", "none"]), self._module()))
        return statements

    def _edit(self) -> Edit:
        return Edit(
            self.random.choice(_EDITS),
            self.random.choice(["", *self.model.names()]),
            at=self._some_batches() if self.chance(0.5) else None,
        )

    def _write(self, at: tuple[int, ...]) -> Write:
        return Write(self.random.choice(_WRITES), self.random.choice(["", *self.model.names()]), at=at)
