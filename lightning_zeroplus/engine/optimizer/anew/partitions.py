"""Upstream's optimizer, built anew in the middle of a fit.

Upstream's optimizers partition the parameters that they are built with. Here another one takes its place, and what the
engine has is carried over by parameter: master weights, optimizer states, gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from deepspeed.runtime.zero.partition_parameters import restore_init_context, shutdown_init_context
from torch import Tensor
from torch.optim import Optimizer

from lightning_zeroplus.engine.optimizer.anew.carried import Carried, OptimizerStates
from lightning_zeroplus.engine.reduction.life import Event
from lightning_zeroplus.engine.upstream.partitioned_weights import forget_functions
from lightning_zeroplus.engine.upstream.scalars import ScalarsAsBytes
from lightning_zeroplus.gradients.shown import read_plain, write_plain
from lightning_zeroplus.weights.agreement import meet
from lightning_zeroplus.weights.holders import take_left


class Changed(NamedTuple):
    """What upstream's optimizer is built around.

    Attributes:
        optimizer: The torch optimizer.
        states: Its states, or those of each optimizer that it chains.
        needs_whole_tensors: Whether it does, or one of them.
    """

    optimizer: Optimizer
    states: Sequence[OptimizerStates]
    needs_whole_tensors: bool


#: Gets the states of each torch optimizer. These have the module's parameters again when it is called.
Change = Callable[[list[OptimizerStates]], Changed]


def is_partitioned(engine: Any) -> bool:
    """Whether the engine's optimizer is upstream's, around the user's; if not, it is the user's own."""
    return engine.gradient_accumulation.torch_optimizer is not engine.optimizer


def make_anew(engine: Any, change: Change, details: str = "") -> Any:
    """Build the optimizer of an engine anew; a collective.

    Args:
        engine: A :class:`~lightning_zeroplus.engine.engine.ZeroPlusEngine`.
        change: See :data:`Change`.
        details: What is changed; the same on all ranks.

    Returns:
        The old optimizer, which is closed. ``engine.optimizer`` is the new one.

    Raises:
        ValueError: If ``details`` differ; nothing was changed.
    """
    # A rank must not close process groups while another one still joins them.
    meet("New partitions for another optimizer, or for further parameters", details)
    accumulation, users, upstreams = engine.gradient_accumulation, engine.user_groups, engine.optimizer
    accumulation.states.put_back()
    accumulation.shown.take_kept()
    accumulation.shown.put_back()  # with what the user has written to them
    whole = accumulation.whole_gradients() if not accumulation.life.is_empty else {}
    accumulation.average_outside(is_looked_at=False)
    whole |= _taken_outside(accumulation)
    carried = Carried(engine) if is_partitioned(engine) else None
    held = accumulation.find_held()
    accumulation.close()
    if hasattr(upstreams, "destroy"):
        upstreams.destroy()
    forget_functions(engine.module)
    if carried is not None:
        users.trained |= {accumulation.params[index] for index in accumulation.optimized}
        users.restore()
    changed = change([] if carried is None else carried.states)
    shutdown_init_context()
    try:
        with ScalarsAsBytes():
            engine.build_optimizer(changed.optimizer)
    finally:
        restore_init_context()
    now = engine.gradient_accumulation
    if carried is not None:
        if changed.needs_whole_tensors:
            now.step_whole_tensors()
        carried.give_back(changed.states)
    moved = {old: now.index[id(param)] for old, param in enumerate(accumulation.params) if id(param) in now.index}
    now.used = {moved[index] for index in accumulation.used if index in moved}
    whole = {moved[index]: grad for index, grad in whole.items() if index in moved}
    left = {index: whole.pop(index) for index in whole.keys() - now.optimized}
    kept = now.shown.kept
    for index, grad in (left if kept is None else kept.updated(left)).items():
        now.write_outside(now.params[index], grad)
    now.outside_was_seen = accumulation.outside_was_seen or kept is not None
    now.shown.forget(left)
    if whole:
        now.life.goes_on(Event.SET)
        now.take_back(whole)
    now.hold(held + take_left(engine.module))
    return upstreams


def _taken_outside(accumulation: Any) -> dict[int, Tensor]:
    """Take the gradients of parameters that no optimizer has, which upstream may drop."""
    taken = {}
    for index, param in enumerate(accumulation.params):
        if index not in accumulation.optimized and (grad := read_plain(param)) is not None:
            taken[index] = grad.detach()
            write_plain(param, None)
    return taken


def become(handle: Any, optimizer: Any) -> None:
    """Turn what the Trainer, Fabric or the user has of an optimizer into the one that took its place."""
    handle.__class__ = type(optimizer)
    handle.__dict__ = optimizer.__dict__
