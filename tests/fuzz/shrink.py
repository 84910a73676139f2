"""Makes a program that fails smaller, for as long as it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from tests.fuzz.model import Model
from tests.fuzz.program import Program
from tests.fuzz.statements import Loss, Statement, Window


def shrink(program: Program, fails: Callable[[Program], bool], attempts: int = 200) -> Program:
    """The smallest program found.

    Args:
        program: One that fails.
        fails: Whether a program fails, in the same way.
        attempts: How many smaller programs to try.
    """
    found = True
    while found:
        found = False
        for smaller in _smaller(program):
            attempts -= 1
            if attempts < 0:
                return program
            if fails(smaller):
                program, found = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for body in _shorter(program.body):
        yield replace(program, body=body)
    for before in _shorter(program.before):
        yield replace(program, before=before)
    for batches in (1, 2, program.batches - 1):
        if 0 < batches < program.batches:
            yield replace(program, batches=batches)
    for model in _smaller_models(program.model):
        yield replace(program, model=model)
    for key, value in {
        "optimizer": "sgd",
        "grouped": False,
        "scheduled": False,
        "overlap": False,
        "bucket": 10**6,
        "threshold": 0,
    }.items():
        if getattr(program, key) != value:
            yield replace(program, **{key: value})  # type: ignore[arg-type]


def _shorter(statements: tuple[Statement, ...]) -> Iterator[tuple[Statement, ...]]:
    for index in range(len(statements)):
        yield statements[:index] + statements[index + 1 :]
    for index, statement in enumerate(statements):
        for simpler in _simpler(statement):
            yield (*statements[:index], *simpler, *statements[index + 1 :])


def _simpler(statement: Statement) -> Iterable[tuple[Statement, ...]]:
    if statement.at is not None:
        yield (replace(statement, at=None),)
    if isinstance(statement, Window):
        yield statement.body
        for body in _shorter(statement.body):
            yield (replace(statement, body=body),)
    plain: dict[str, object] = {"bare": False, "by_torch": False, "retain": False, "by_rank": None}
    if isinstance(statement, Loss):
        plain |= {"kind": "mse", "half": None, "head": 0, "of": None, "detached": False}
    for key, value in plain.items():
        if getattr(statement, key, value) != value:
            yield (replace(statement, **{key: value}),)  # type: ignore[arg-type]


def _smaller_models(model: Model) -> Iterator[Model]:
    if model.hook:
        yield replace(model, hook=False)
    if model.heads > 1:
        yield replace(model, heads=model.heads - 1)
    if len(model.layers) > 1:
        yield replace(model, layers=model.layers[:-1])
    for index, layer in enumerate(model.layers):
        simpler = [replace(layer, recomputed=None), replace(layer, frozen=False), replace(layer, kind="linear")]
        for each in simpler:
            if each != layer:
                yield replace(model, layers=(*model.layers[:index], each, *model.layers[index + 1 :]))
