"""defer_weight_grads: let the linear layers of a model defer their weight gradients."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from lightning_zeroplus.weight_grads.grouped import DeferredGroupedLinear
from lightning_zeroplus.weight_grads.linear import DeferredLinear
from lightning_zeroplus.weight_grads.store import WeightGradStore


def defer_weight_grads(
    module: nn.Module, names: str | Iterable[str] | None = None, store: WeightGradStore | None = None
) -> list[str]:
    """Turn ``nn.Linear`` layers into :class:`~lightning_zeroplus.DeferredLinear`, in place and before sharding.

    The modules stay the same objects, with their parameters, hooks and names; state dicts do not change. Subclasses of
    ``nn.Linear`` are left alone, because they may compute something else.

    Args:
        module: The model.
        names: Shell patterns for qualified names, such as ``"layers.*.mlp.*"``. None: every linear layer.
        store: The store of the matching layers, including layers that defer already. None: their own store, or the
            store that the strategy gives them.

    Returns:
        The qualified names of the matching layers.

    Raises:
        ValueError: If a pattern matches no linear layer; nothing has been converted.
    """
    patterns = ["*"] if names is None else [names] if isinstance(names, str) else list(names)
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matched = {
            name: child
            for name, child in module.named_modules()
            if (type(child) is nn.Linear or isinstance(child, (DeferredLinear, DeferredGroupedLinear)))
            and fnmatchcase(name, pattern)
        }
        if not matched and names is not None:
            raise ValueError(
                f"`defer_weight_grads(names={names!r})`: {pattern!r} matches no `nn.Linear`. Give the names that"
                " `module.named_modules()` shows, and convert before `fully_shard`."
            )
        found |= matched
    for child in found.values():
        if type(child) is nn.Linear:
            child.__class__ = DeferredLinear
        if store is not None:
            child.store = store  # type: ignore[assignment]
    return list(found)


def give_store(module: nn.Module, store: WeightGradStore) -> int:
    """Give ``store`` to every deferring layer of ``module`` without a store; return how many layers use it."""
    layers = [child for child in module.modules() if isinstance(child, (DeferredLinear, DeferredGroupedLinear))]
    for layer in layers:
        if layer.store is None:
            layer.store = store
    return sum(layer.store is store for layer in layers)
