"""``fabric.save(filter=...)``: which entries of a model are saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn

from lightning_zeroplus.checkpoint.everywhere import everywhere
from lightning_zeroplus.checkpoint.hooked import Chosen
from lightning_zeroplus.weights.gathered import gathered

#: ``keep(name, tensor)``.
Filter = Callable[[str, Any], bool]


def filtered(found: Chosen, module: nn.Module, names: Mapping[str, str], keep: Filter) -> Chosen:
    """The entries that ``keep`` accepts; it sees whole tensors, at stage 3 one at a time. All ranks call it.

    A tied parameter is saved if it is accepted under one of its names.

    Args:
        found: The entries.
        module: Their module.
        names: Of its parameters in the file, by their own, where they differ.
        keep: The user's.

    Raises:
        Exception: On every rank, what ``keep`` has raised on one.
    """
    kept, errors = set(), []
    first = {param: name for name, param in module.named_parameters()}
    for name, param in module.named_parameters(remove_duplicate=False):
        with gathered(param) if hasattr(param, "ds_id") else nullcontext():
            try:
                if first[param] in found.kept and keep(names.get(name, name), param.detach()):
                    kept.add(first[param])
            except Exception as error:
                errors.append(error)

    def extra() -> dict[str, Any]:
        if errors:
            raise errors[0]
        return {name: value for name, value in found.extra.items() if keep(name, value)}

    return Chosen(frozenset(kept), everywhere(extra))
