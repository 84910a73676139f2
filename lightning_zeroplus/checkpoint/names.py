"""Names in checkpoints: of averages, of the states of several optimizers of one parameter, of what was renamed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

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


def sorted_states(states: Mapping[str, Any], shape: Any) -> dict[str, Any]:
    """Split the states of a parameter.

    Args:
        states: By key.
        shape: Of the parameter, or of the flat tensor that the optimizer has.

    Returns:
        ``elementwise``: the dtypes of those with one element for each element of the parameter, by key; ``others``.
    """
    elementwise = {
        key: value.dtype
        for key, value in sorted(states.items(), key=lambda item: str(item[0]))
        if isinstance(value, Tensor) and value.shape == shape and not is_step(key)
    }
    return {"elementwise": elementwise, "others": {k: v for k, v in states.items() if k not in elementwise}}


def dtype_to_load(states: Mapping[str, Any], key: str) -> torch.dtype | None:
    """The dtype of an elementwise state whose values are codes, as those of 8 bits are; None: they may be cast.

    Args:
        states: As :func:`sorted_states` gives them. Earlier versions have written the keys alone.
        key: Of the state.
    """
    elementwise = states.get("elementwise", ())
    dtype = elementwise.get(key) if isinstance(elementwise, Mapping) else None
    return None if dtype is None or dtype.is_floating_point or dtype.is_complex else dtype


def is_step(key: Any) -> bool:
    """Whether a state is a number of steps, which may have the shape of a parameter with one element."""
    return isinstance(key, str) and key.rpartition(":")[2] == "step"
