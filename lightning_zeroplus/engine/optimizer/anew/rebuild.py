"""New partitions for parameters that have become trainable, or were added by ``add_param_group``.

Upstream's optimizers partition the parameters that are trainable when they are built. Others would never be updated.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_zeroplus.engine.optimizer.anew.carried import OptimizerStates
from lightning_zeroplus.engine.optimizer.anew.partitions import (
    Changed,
    become,
    is_partitioned,
    make_anew,
    refuse_new,
    refuse_now,
)
from lightning_zeroplus.engine.optimizer.chain import params_of


def rebuild(engine: Any, new_group: dict[str, Any] | None = None, part: int | None = None) -> None:
    """Rebuild the optimizer of an engine over all parameters of the user's groups that are trainable now.

    A collective. The optimizer stays the same object, around the same torch optimizer.

    Args:
        engine: A :class:`~lightning_zeroplus.engine.engine.ZeroPlusEngine`.
        new_group: A group to add to the torch optimizer.
        part: The number of the optimizer to add it to, if there are several.

    Raises:
        ValueError: If the group has a parameter that came into the module during the fit; nothing was changed.
        RuntimeError: Within a window, or if the engine is compiled; nothing was changed.
    """
    users = engine.user_groups
    if new_group is not None:
        if not isinstance(new_group["params"], Tensor):
            new_group["params"] = list(new_group["params"])
        refuse_new(engine, params_of(new_group), "add_param_group()")
    if not is_partitioned(engine):
        assert new_group is not None
        users.add(new_group, part)
        return
    refuse_now(engine, "A parameter became trainable", "Unfreeze it, or add its group,")
    accumulation = engine.gradient_accumulation

    def change(states: list[OptimizerStates]) -> Changed:
        if new_group is not None:
            users.add(new_group, part)
        return Changed(accumulation.torch_optimizer, states, accumulation.split_steps.has_whole_tensors)

    upstreams = make_anew(engine, change)
    # The Trainer and the user hold the old object, which becomes the new optimizer.
    become(upstreams, engine.optimizer)
    engine.optimizer = upstreams
