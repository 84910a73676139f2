"""Whether a checkpoint fits the model and the optimizer, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_NAMED = 5


def check_parameters(
    path: str, saved: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]], strict: bool
) -> None:
    """Compare names and shapes of parameters.

    Args:
        path: The checkpoint, for the message.
        saved: Shapes by name in the checkpoint.
        wanted: Shapes by name in the model.
        strict: Refuse missing and unexpected names too, not only other shapes.

    Raises:
        RuntimeError: If they differ, naming the parameters.
    """
    problems = []
    if strict:
        problems += _list("missing", wanted.keys() - saved.keys())
        problems += _list("unexpected", saved.keys() - wanted.keys())
    shapes = {
        f"{name} {tuple(saved[name])} instead of {tuple(wanted[name])}"
        for name in saved.keys() & wanted.keys()
        if tuple(saved[name]) != tuple(wanted[name])
    }
    problems += _list("of another shape", shapes)
    if problems:
        raise RuntimeError(
            f"The checkpoint {path!r} is of another model. Its parameters and buffers are {'; '.join(problems)}."
            " Nothing has been loaded."
        )


def _list(what: str, names: Iterable[str]) -> list[str]:
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return [f"{what}: {', '.join(ordered[:_NAMED])}{more}"] if ordered else []


def check_optimizer(
    path: str, saved: Mapping[str, Any], kind: str, names: Sequence[Sequence[str]], settings: Iterable[str]
) -> None:
    """Compare optimizers.

    Args:
        path: The checkpoint, for the message.
        saved: ``class`` (None if unknown), and ``groups`` with ``names`` and ``settings``, and ``shapes`` of all
            members of the group by name, where these are known. Some may have been frozen, and have no state.
        kind: Class of the optimizer that will load the state.
        names: The parameters in each of its groups, sorted.
        settings: The keys that each group must set, such as ``"lr"``.

    Raises:
        RuntimeError: If they differ, naming the difference.
    """
    problem = None
    missing = sorted({key for group in saved["groups"] for key in settings if key not in group["settings"]})
    if saved["class"] not in (None, kind):
        problem = f"it is the state of {saved['class']}, not {kind}"
    elif len(saved["groups"]) != len(names):
        problem = f"it has {len(saved['groups'])} parameter groups, not {len(names)}"
    elif missing:
        problem = f"its parameter groups do not set {', '.join(map(repr, missing))}, which {kind} needs"
    else:
        for index, (group, wanted) in enumerate(zip(saved["groups"], names, strict=True)):
            differing = _list("only in the checkpoint", set(group["names"]) - set(wanted))
            differing += _list("only in the model", set(wanted) - set(group["names"]) - set(group.get("shapes", ())))
            if differing:
                problem = f"parameter group {index} has other trained parameters, {'; '.join(differing)}"
                break
    if problem is not None:
        raise RuntimeError(
            f"The optimizer state of the checkpoint {path!r} does not fit: {problem}. To start anew from its weights,"
            " write them to a file with `lightning_zeroplus.export` and pass that file. Nothing has been loaded."
        )
