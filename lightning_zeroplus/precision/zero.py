"""The precision plugin of the ZeRO strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision.deepspeed import DeepSpeedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_zeroplus.engine.engine import ZeroPlusEngine


class ZeroPlusPrecision(DeepSpeedPrecision):
    """Backward, clipping and stepping through a :class:`~lightning_zeroplus.engine.engine.ZeroPlusEngine`.

    :class:`~lightning_zeroplus.ZeroPlusStrategy` chooses it by itself; pass ``precision=`` to the Trainer.

    Args:
        precision: ``"32-true"``, ``"bf16-true"``, ``"bf16-mixed"``, ``"16-true"`` or ``"16-mixed"``. The ``mixed``
            forms train like the ``true`` forms, with low-precision parameters and fp32 master weights, but leave
            the LightningModule's dtype to the engine.

    Raises:
        ValueError: If ``precision`` is none of these.
    """

    @override
    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: pl.LightningModule,
        optimizer: Steppable | None,
        *args: Any,
        gradient: Tensor | None = None,
        retain_graph: bool = False,
        **kwargs: Any,
    ) -> None:
        """Differentiate ``tensor`` as ``torch.Tensor.backward`` would; the gradients reach the engine.

        Args:
            tensor: The loss: one element, or any shape if ``gradient`` is given.
            model: The LightningModule.
            optimizer: Not used: the engine has it.
            *args: Passed to the base class.
            gradient: The vector of the vector-Jacobian product, of ``tensor``'s shape.
            retain_graph: Keep the graph for another backward.
            **kwargs: Refused, see below.

        Raises:
            MisconfigurationException: For ``create_graph`` and ``inputs``, which the engine cannot honour.
        """
        unsupported = sorted(name for name, value in kwargs.items() if value)
        if unsupported:
            raise MisconfigurationException(
                f"manual_backward({', '.join(f'{n}=...' for n in unsupported)}) is not supported by"
                " `ZeroPlusStrategy`. Use torch.autograd.grad(...) for higher-order gradients or chosen inputs, and"
                " manual_backward() for gradients of the parameters."
            )
        if gradient is not None:
            tensor = (tensor * gradient.detach()).sum()
        if is_overridden("backward", model):
            # Its loss.backward() is right too: the engine ends a backward that it did not start itself.
            model.backward(tensor, *args, retain_graph=retain_graph)
        else:
            super().backward(tensor, model, optimizer, *args, retain_graph=retain_graph)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, then let the engine step.

        A closure that returned None (``training_step`` skipped the batch) steps with the gradients that are there;
        without any, the engine does nothing, as a torch optimizer would under DDP.

        Raises:
            MisconfigurationException: For ``LBFGS``, which needs to evaluate the loss within its step.
        """
        if isinstance(optimizer, LBFGS):
            raise MisconfigurationException("`ZeroPlusStrategy` does not support the LBFGS optimizer.")
        result = closure()
        self._after_closure(model, optimizer)
        cast("ZeroPlusEngine", model.trainer.model).step(**kwargs)
        return result

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the global gradient in the next optimizer step.

        The gradients are sharded, and at stages 0 and 1 not even reduced before ``step()``, so the request is kept
        until then. It needs no reduction beyond the scalar one that the step's gradient norm takes anyway.

        Args:
            optimizer: The optimizer, wrapped by Lightning or not.
            clip_val: Largest L2 norm or largest absolute value; nothing is clipped if it is 0 or negative.
            gradient_clip_algorithm: By ``norm`` or by ``value``.
        """
        if clip_val <= 0:
            return
        from lightning_zeroplus.engine.clip import Clip

        accumulation = optimizer.gradient_accumulation  # type: ignore[attr-defined]
        accumulation.engine.clip_gradients(Clip(float(clip_val), GradClipAlgorithmType(gradient_clip_algorithm).value))


def low_precision_dtype(precision: str) -> torch.dtype | None:
    """The dtype of parameters and activations under ``precision``, or None for fp32."""
    return {"bf16": torch.bfloat16, "16": torch.float16}.get(precision.split("-")[0])
