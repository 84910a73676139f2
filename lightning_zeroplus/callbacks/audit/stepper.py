"""Torch optimizers that step together, and the moment when their gradients are final."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer

from lightning_zeroplus.callbacks.audit.comparison import Comparison
from lightning_zeroplus.callbacks.audit.shares import Share, engine_optimizers, engine_shares, optimizer_shares
from lightning_zeroplus.gradients.clip import Clip


@dataclass
class Stepper:
    """Torch optimizers that step together, and the clippings of their next step.

    A DeepSpeed engine has one stepper, or one for each of several optimizers. Without DeepSpeed every optimizer is one.

    Attributes:
        optimizers: The optimizers.
        shares: Where they hold the parameters, by the parameter's ``id``.
        members: The ``id`` of every parameter that they update, on any rank. None: every parameter of the module if
            this is the only stepper, else the parameters in ``shares``.
        clips: The clippings since the last step.
        comparison: The comparison of the running step.
    """

    optimizers: list[Optimizer]
    shares: dict[int, Share]
    members: frozenset[int] | None = None
    clips: list[Clip] = field(default_factory=list)
    comparison: Comparison | None = None
    _depth: int = 0  # of nested step() calls: a step() may call its base class's step(), which runs the hooks again

    def updated(self) -> frozenset[int]:
        """The ``id`` of every parameter that they update, as far as this rank knows."""
        return frozenset(self.shares) if self.members is None else self.members

    def before_step(
        self, consume: Callable[[Optimizer], None], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """``optimizer.step()`` begins: consume its gradients. With a closure they are final when it returns."""
        self._depth += 1
        if self._depth > 1:
            return None
        positional = len(args) > 1 and callable(args[1])
        closure = args[1] if positional else kwargs.get("closure")
        if closure is None:
            consume(optimizer)
            return None

        def audited() -> Any:
            result = closure()
            consume(optimizer)
            return result

        if positional:
            return (args[0], audited, *args[2:]), kwargs
        return args, {**kwargs, "closure": audited}

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``optimizer.step()`` has ended."""
        self._depth -= 1

    def clippings(self, engine: Any) -> list[Clip]:
        """The clippings of this step. A request to clip by norm replaces the engine's own limit."""
        configured = float(engine.gradient_clipping() or 0.0) if engine is not None else 0.0
        if configured <= 0 or any(clip.algorithm == "norm" for clip in self.clips):
            return list(self.clips)
        return [Clip(configured, "norm"), *self.clips]


def find_steppers(engine: Any, optimizers: list[Optimizer], module: nn.Module) -> list[Stepper]:
    """All steppers of a fit.

    Args:
        engine: The DeepSpeed engine, or None.
        optimizers: The Trainer's optimizers.
        module: The LightningModule.

    Raises:
        MisconfigurationException: If the engine is DeepSpeed's own and compiles with DeepCompile.
    """
    if engine is None:
        return [Stepper([optimizer], optimizer_shares([optimizer])) for optimizer in optimizers]
    if engine.is_deepcompile_enabled():
        raise MisconfigurationException(
            "`GradientAudit` cannot audit DeepSpeed's own DeepCompile, which reduces gradients inside the compiled"
            " graph: they reach no leaf. Audit the loop without `compile`, or under `zeroplus_stage3_compile`."
        )
    params = list(module.parameters())
    shares = engine_shares(engine, params)
    accumulation = getattr(engine, "gradient_accumulation", None)
    if accumulation is None or accumulation.chain is None:
        return [Stepper(engine_optimizers(engine), shares)]
    return [
        Stepper([optimizer], shares, frozenset(id(params[index]) for index in accumulation.members(number)))
        for number, optimizer in enumerate(accumulation.chain.parts)
    ]
