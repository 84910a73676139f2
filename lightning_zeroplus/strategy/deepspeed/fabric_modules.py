"""Modules that Fabric sets up: their engines, where they take their inputs, and which of them an optimizer is for."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.wrappers import _unwrap_compiled
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_zeroplus.engine.optimizer.chain import parts_of
from lightning_zeroplus.precision.zero import part_of

if TYPE_CHECKING:
    from lightning_zeroplus.engine.engine import ZeroPlusEngine


class OwnsEngines:
    """Mixin: the engines of the modules that Fabric has set up, with optimizers and without.

    An engine is destroyed when its module is set up again, or by :meth:`teardown`. At stages 1 to 3 Python's
    garbage collection cannot free it: PyTorch's graph holds the parameters, and their hooks hold the engine.
    """

    _engines: list[ZeroPlusEngine]
    _evaluated: list[ZeroPlusEngine]

    def _forget_destroyed(self) -> None:
        self._engines = [engine for engine in self._engines if not engine.destroyed]
        self._evaluated = [engine for engine in self._evaluated if not engine.destroyed]

    def is_stepping(self) -> bool:
        """Whether one of them is."""
        return any(engine.stepping for engine in self._engines)

    def teardown(self) -> None:
        """Free the engines. Modules have ordinary weights again, which all ranks gather at stage 3."""
        for engine in (*self._engines, *self._evaluated):
            engine.destroy()
        self._forget_destroyed()
        super().teardown()  # type: ignore[misc]


def engine_of(value: Any, engines: Sequence[ZeroPlusEngine] = ()) -> ZeroPlusEngine | None:
    """The engine of a module: of what ``fabric.setup`` has returned, or of the user's own module among ``engines``."""
    from lightning_zeroplus.engine.engine import ZeroPlusEngine

    if not isinstance(value, nn.Module):
        return None
    value = _unwrap_compiled(value)[0]
    value = _unwrap_compiled(getattr(value, "_forward_module", value))[0]
    if isinstance(value, ZeroPlusEngine):
        return value
    return next((engine for engine in engines if engine.module is value), None)


def engine_and_part(value: Any, engines: Sequence[ZeroPlusEngine]) -> tuple[ZeroPlusEngine, int] | None:
    """The engine of an optimizer, and the optimizer's number: of what ``fabric.setup`` has returned, or of torch's."""
    if not isinstance(value, Optimizer):
        return None
    accumulation = getattr(value, "gradient_accumulation", None)
    if accumulation is not None:
        return accumulation.engine, part_of(value) or 0
    for engine in engines:
        for number, part in enumerate(parts_of(engine.basic_optimizer)):
            if part is value:
                return engine, number
    return None


def move_inputs(module: nn.Module, device: torch.device) -> None:
    """Let ``module`` move tensors among its inputs to ``device``, as ``DistributedDataParallel`` does on a GPU."""
    if device.type == "cpu":
        return

    def move(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))

    module.register_forward_pre_hook(move, with_kwargs=True)


def are_frozen(engines: Sequence[ZeroPlusEngine]) -> bool:
    """Whether there are modules without an optimizer, and none of them has parameters to train."""
    params = [param for engine in engines for param in engine.module.parameters()]
    return bool(engines) and not any(param.requires_grad for param in params)


def refuse_other_optimizers(engine: ZeroPlusEngine, owner: OwnsEngines) -> None:
    """Let steps fail of torch optimizers that update a module that was set up without its optimizer.

    Nobody averages its gradients. Under DDP they are averaged for whichever optimizer steps.

    Args:
        engine: The module's engine, which has no optimizer.
        owner: The strategy; one of its engines may step, and train parameters of this module, too.
    """
    params = frozenset(id(param) for param in engine.module.parameters())
    found, owned = weakref.ref(engine), weakref.ref(owner)  # torch keeps the hook

    def check(optimizer: Optimizer, *_: Any) -> None:
        now, strategy = found(), owned()
        if now is None or now.destroyed or now.gradient_accumulation is not None:
            return
        if strategy is not None and strategy.is_stepping():
            return
        for group in optimizer.param_groups:
            if any(id(param) in params and param.grad is not None for param in group["params"]):
                raise RuntimeError(
                    f"`{type(optimizer).__name__}.step()` for a module that `fabric.setup_module(model)` has set up"
                    " without it: the gradients are this rank's alone. Set up both, `model, optimizer ="
                    " fabric.setup(model, optimizer)`, or the optimizer after it, `fabric.setup_optimizers(optimizer)`."
                )

    weakref.finalize(engine, register_optimizer_step_pre_hook(check).remove)


def engine_for(optimizer: Optimizer, engines: Sequence[ZeroPlusEngine]) -> ZeroPlusEngine:
    """The engine that ``optimizer`` is for, by its parameters.

    Args:
        optimizer: What ``fabric.setup_optimizers`` has got.
        engines: Those of all modules that were set up.

    Raises:
        RuntimeError: If there is none, or not one alone; or if it has gradients, which no rank has averaged, because
            the engine has no optimizer yet.
    """
    params = {param for group in optimizer.param_groups for param in group["params"]}
    owners = [engine for engine in engines if not params.isdisjoint(engine.module.parameters())]
    name = type(optimizer).__name__
    if len(owners) != 1:
        found = "no module" if not owners else f"{len(owners)} modules"
        raise RuntimeError(
            f"`fabric.setup_optimizers({name})`: its parameters are those of {found} that `fabric.setup_module(model)`"
            " has set up before. ZeRO partitions an optimizer together with its model: set up the model first, or both"
            " at once with `model, optimizer = fabric.setup(model, optimizer)`; and give each model its own optimizer."
        )
    if owners[0].gradient_accumulation is not None:
        return owners[0]
    early = next((name for name, param in owners[0].module.named_parameters() if param.grad is not None), None)
    if early is not None:
        raise RuntimeError(
            f"`fabric.setup_optimizers({name})`: the parameter {early!r} has a gradient from before, which is this"
            " rank's alone. Call `model.zero_grad()` first, or set up the optimizer before the first backward."
        )
    return owners[0]


class NoSync(_BackwardSyncControl):
    """``fabric.no_backward_sync(model)``: accumulate on this rank only, at every stage."""

    @override
    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager:
        return module.no_sync() if enabled else nullcontext()
