"""Names in checkpoints: of averages, of the states of several optimizers of one parameter, of what was renamed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: Where one file has whole averages, by parameter.
AVERAGES = "zeroplus_ema"


def of_zero(parameter: str) -> str:
    """The name of a parameter's average in a folder that ``ZeroPlusStrategy`` has saved."""
    return f"optimizer/{parameter}/{AVERAGES}"


def of_fsdp(parameter: str) -> str:
    """The name of a parameter's average in a folder that ``ZeroPlusFSDPStrategy`` has saved."""
    return f"optimizer_0.{AVERAGES}.{parameter}"


def are_averaged(names: Iterable[str]) -> bool:
    """Whether there are averages among the tensors of a folder."""
    return any(AVERAGES in name for name in names)


def joint_key(number: int, key: Any) -> str:
    """The key of an optimizer's state where several optimizers have states of one parameter.

    Args:
        number: The number of the optimizer; the keys of the first one stay.
        key: Its own key.

    Raises:
        TypeError: If the key is not a string.
    """
    if not isinstance(key, str):
        raise TypeError(f"An optimizer that shares a parameter has a state {key!r}: its key must be a string.")
    return key if number == 0 else f"{number}:{key}"


def by_number(states: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The states of one parameter by the number of the optimizer, with its own keys: undoes :func:`joint_key`."""
    found: dict[int, dict[str, Any]] = {}
    for key, value in states.items():
        number, separator, own = key.partition(":")
        if separator and number.isdigit():
            found.setdefault(int(number), {})[own] = value
        else:
            found.setdefault(0, {})[key] = value
    return found


def renamed_optimizer(optimizer: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The ``optimizer`` of an engine's summary with other names of parameters.

    Args:
        optimizer: The entry.
        names: New names by old ones, where they differ.
    """
    groups = [
        group
        | {
            "names": sorted(names.get(name, name) for name in group["names"]),
            "shapes": {names.get(name, name): shape for name, shape in group.get("shapes", {}).items()},
        }
        for group in optimizer["groups"]
    ]
    states = {names.get(name, name): state for name, state in optimizer["states"].items()}
    return {**optimizer, "groups": groups, "states": states}


def is_step(key: Any) -> bool:
    """Whether a state is a number of steps, which may have the shape of a parameter with one element."""
    return isinstance(key, str) and key.rpartition(":")[2] == "step"
