"""The states of a torch optimizer, which numbers its parameters in the order of its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def states_by_name(path: str, saved: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, dict[str, Any]]:
    """A torch optimizer's states by parameter name.

    Args:
        path: The checkpoint, for the message.
        saved: The optimizer's ``state_dict()``.
        groups: The names of the parameters in the groups of the optimizer that will load it.

    Raises:
        RuntimeError: If the groups have other sizes.
    """
    sizes, wanted = [len(group["params"]) for group in saved["param_groups"]], [len(names) for names in groups]
    if sizes != wanted:
        raise RuntimeError(
            f"The optimizer state of the checkpoint {path!r} does not fit: its parameter groups have {sizes}"
            f" parameters, not {wanted}. Nothing has been loaded."
        )
    numbers = (number for group in saved["param_groups"] for number in group["params"])
    names = (name for group in groups for name in group)
    states: dict[str, dict[str, Any]] = {}
    for number, name in zip(numbers, names, strict=True):
        if number in saved["state"]:
            states.setdefault(name, {}).update(saved["state"][number])  # several optimizers may have some
    return states
