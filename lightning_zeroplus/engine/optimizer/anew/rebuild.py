"""New partitions for parameters that have become trainable, or were added by ``add_param_group``.

Upstream's optimizers partition the parameters that are trainable when they are built. Others would never be updated.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_zeroplus.engine.optimizer.anew.exchange import Exchange, refuse_new, refuse_now
from lightning_zeroplus.engine.optimizer.chain import params_of


def rebuild(engine: Any, new_group: dict[str, Any] | None = None, part: int = 0) -> None:
    """Rebuild the optimizer of an engine over all parameters of the user's groups that are trainable now.

    A collective. The optimizers stay the same objects.

    Args:
        engine: A :class:`~lightning_zeroplus.engine.engine.ZeroPlusEngine`.
        new_group: A group to add to a torch optimizer.
        part: The number of this optimizer.

    Raises:
        ValueError: If the group has a parameter that came into the module during the fit, or that another group of the
            optimizer has; nothing was changed.
        RuntimeError: Within a window, or if the engine is compiled; nothing was changed.
    """
    refuse_now(engine, "A parameter became trainable", "Unfreeze it, or add its group,")
    if new_group is not None:
        if not isinstance(new_group["params"], Tensor):
            new_group["params"] = list(new_group["params"])
        refuse_new(engine, params_of(new_group), "add_param_group()")
        _refuse_twice(engine, new_group, part)
    group = None if new_group is None else (new_group, part)
    Exchange(engine, engine.shown_optimizers(), group).run()


def _refuse_twice(engine: Any, group: dict[str, Any], part: int) -> None:
    chain, groups = engine.gradient_accumulation.chain, engine.user_groups.params
    if chain is not None:
        groups = [params for _, params in chain.groups_of_users(part, groups)]
    if not {id(param) for param in params_of(group)}.isdisjoint(id(param) for params in groups for param in params):
        raise ValueError("`add_param_group()`: some parameters of the group are in another group of this optimizer.")
