"""New partitions in the middle of a fit, for parameters that have become trainable.

Upstream's optimizers partition the parameters that are trainable when they are built. Parameters that are unfrozen
later, or added by ``add_param_group``, would never be updated. Here the optimizer is rebuilt around the same torch
optimizer, and its state is carried over by parameter: master weights, optimizer states, gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed.runtime.zero.partition_parameters import restore_init_context, shutdown_init_context
from torch import Tensor

from lightning_zeroplus.engine.optimizer.chain import all_groups, settings_of
from lightning_zeroplus.engine.reduction.life import Event
from lightning_zeroplus.engine.state.layout import parameter_shape
from lightning_zeroplus.engine.state.parts import EngineState, assemble, by_name
from lightning_zeroplus.engine.upstream.scalars import ScalarsAsBytes

#: What upstream's stage 3 puts into the graph around a module. The old optimizer's must not be used any longer.
_FUNCTIONS = ("pre_bwd_fn", "post_bwd_fn")


def rebuild(engine: Any, new_group: dict[str, Any] | None = None, part: int | None = None) -> None:
    """Rebuild the optimizer of an engine over all parameters of the user's groups that are trainable now.

    A collective. The optimizer stays the same object.

    Args:
        engine: A :class:`~lightning_zeroplus.engine.engine.ZeroPlusEngine`.
        new_group: A group to add to the torch optimizer.
        part: The number of the optimizer to add it to, if there are several.

    Raises:
        ValueError: If the group has a parameter that came into the module during the fit; nothing was changed.
        RuntimeError: Within a window, or if the engine is compiled; nothing was changed.
    """
    accumulation, users = engine.gradient_accumulation, engine.user_groups
    given = [] if new_group is None else new_group["params"]
    if new_group is not None and not isinstance(given, Tensor):
        new_group["params"] = given = list(given)
    if any(id(param) not in accumulation.index for param in ([given] if isinstance(given, Tensor) else _plain(given))):
        raise ValueError(
            "`add_param_group()` was given a parameter that the module did not have when the fit began: its gradients"
            " would not be averaged over the ranks. Make it before the fit, with `requires_grad_(False)` until it is"
            " needed, or begin another fit."
        )
    if accumulation.torch_optimizer is engine.optimizer:  # nothing is partitioned
        assert new_group is not None
        users.add(new_group, part)
        return
    if accumulation.holding or engine.compilation is not None:
        where = "under `compile`" if engine.compilation is not None else "inside a coalesce() window or no_sync()"
        raise RuntimeError(
            f"A parameter became trainable {where}, where the partitions cannot be made anew. Unfreeze it, or add its"
            " group, before the fit" + ("." if engine.compilation is not None else " or between two steps.")
        )
    accumulation.shown.put_back()  # with what the user has written to them
    whole = accumulation.whole_gradients() if not accumulation.life.is_empty else None
    used = accumulation.used
    carried = _Carried(engine)
    upstreams = engine.optimizer
    accumulation.close()
    if hasattr(upstreams, "destroy"):
        upstreams.destroy()
    for module in engine.module.modules():
        for name in _FUNCTIONS:
            vars(module).pop(name, None)
    users.trained |= {accumulation.params[index] for index in accumulation.optimized}
    users.restore()
    if new_group is not None:
        users.add(new_group, part)
    shutdown_init_context()
    try:
        with ScalarsAsBytes():
            engine.build_optimizer(accumulation.torch_optimizer)
    finally:
        restore_init_context()
    # The Trainer and the user hold the old object, which becomes the new optimizer.
    upstreams.__class__ = type(engine.optimizer)
    upstreams.__dict__ = engine.optimizer.__dict__
    engine.optimizer = upstreams
    carried.give_back()
    accumulation = engine.gradient_accumulation
    accumulation.used = used
    if whole is not None:
        accumulation.life.goes_on(Event.SET)
        accumulation.take_back(whole)


class _Carried:
    """The state of an engine while its partitions are made anew."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        state = EngineState(engine)
        self._summary = state.summary(with_optimizer=True)
        self._parts = by_name(part._replace(data=part.data.clone()) for part in state.own_parts(with_optimizer=True))

    def give_back(self) -> None:
        """Load the state into the new partitions. One reduction per parameter and state is enough: this is rare."""
        state = EngineState(self._engine)
        optimizer = self._summary["optimizer"]
        staged = state.buffers_for(optimizer)
        wanted = by_name(staged.parts())
        for name, param in self._engine.module.named_parameters():
            keys = [None, *optimizer["states"].get(name, {}).get("elementwise", ())]
            for key in keys:
                shape, device = parameter_shape(param), self._engine.device
                whole = assemble(self._parts.get((name, key), []), shape, device).flatten()
                for part in wanted.get((name, key), ()):
                    part.data.copy_(whole.narrow(0, part.start, part.data.numel()))
        optimizer["groups"] = [{"settings": settings_of(group)} for group in all_groups(state.optimizer)]
        state.load(staged, self._summary, {})


def _plain(params: Iterable[Any]) -> list[Any]:
    """Without the names that torch's optimizers accept beside parameters."""
    return [each[1] if isinstance(each, tuple) else each for each in params]
