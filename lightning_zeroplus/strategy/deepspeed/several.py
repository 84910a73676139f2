"""Several optimizers of one engine, and a backward of several engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zeroplus.engine.optimizer.sharing import chain_of
from lightning_zeroplus.gradients.loss_scale import scaled_by

if TYPE_CHECKING:
    from lightning_zeroplus.engine.engine import ZeroPlusEngine


class IdleOptimizer(Optimizer):
    """Has the trainable parameters and leaves them as they are.

    ZeRO makes its partitions of an optimizer's parameters, and averages gradients into them. A LightningModule without
    an optimizer may still read its gradients, or write its weights itself.

    Args:
        params: The trainable parameters.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.0})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure and change nothing."""
        return None if closure is None else closure()


def chained(optimizers: Sequence[Optimizer]) -> Optimizer:
    """What an engine is built with: the only optimizer, or all of them in one.

    Raises:
        MisconfigurationException: If there is none.
    """
    if not optimizers:
        raise MisconfigurationException("`configure_optimizers` returned an empty list: return an optimizer.")
    if len(optimizers) == 1:
        return optimizers[0]
    return chain_of(optimizers)


def backward_of_several(
    engines: Sequence[ZeroPlusEngine],
    loss: Tensor,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Differentiate ``loss`` once; the hooks of each engine that it comes from see that, and end the backward for it.

    Args:
        engines: All that train.
        loss: As for :meth:`.ZeroPlusEngine.backward`, and so are the next three.
        retain_graph: See there.
        create_graph: See there.
        inputs: See there.
    """
    accumulations = [engine.gradient_accumulation for engine in engines]
    # In fp16 each model has a loss scale of its own. With the smallest, a model whose gradients overflow has its scale
    # lowered until they do not.
    scale = min(engine.loss_scale_factor() for engine in engines)
    if create_graph or inputs is not None:
        scale = 1.0  # as for one engine
    if scale != 1.0:
        loss = loss.float() * scale
    retain_graph = create_graph if retain_graph is None else retain_graph
    with ExitStack() as stack:
        for accumulation in accumulations:
            assert accumulation is not None
            accumulation.restore_hooks()  # a collective since the forward has set them aside
            if retain_graph:
                stack.enter_context(accumulation.retained_graph())
        stack.enter_context(scaled_by(scale))
        loss.backward(retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)
