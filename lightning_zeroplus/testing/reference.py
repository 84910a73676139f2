"""An independent reference of a distributed training: one process, no ZeRO, no Lightning.

DDP defines the gradient of a step: the sum, over all backwards since the last step, of the gradients averaged over the
ranks. Here the micro-batches of all ranks are differentiated in order, each with weight ``1 / world size``, and their
gradients are summed in fp32. The distributed sum has another order of additions, so it may differ by rounding. A
low-precision module is trained as by mixed-precision engines: fp32 master weights are updated and rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Backward(Protocol):
    """The function that a pattern calls for every backward: ``manual_backward``, or the reference's own."""

    def __call__(self, loss: Tensor, **kwargs: Any) -> None:
        """Differentiate ``loss``; ``kwargs`` as for ``torch.Tensor.backward``."""


#: A training step without its optimizer: forward and any number of backwards of one rank's batch. The arguments are the
#: module, the batch, the backward, and the index of the batch.
Pattern = Callable[[nn.Module, Any, Backward, int], None]


class Reference(NamedTuple):
    """The result that a loop must reach.

    Attributes:
        params: The fp32 parameters after each optimizer step, cloned, in the module's order.
        norms: The global L2 norm of the averaged gradient at each step, before clipping.
    """

    params: list[list[Tensor]]
    norms: list[float]


def train_reference(
    module: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    pattern: Pattern,
    batches: Iterable[Sequence[Any]],
    *,
    steps_at: Callable[[int], bool] = lambda index: True,
    clip: Callable[[list[nn.Parameter]], object] | None = None,
) -> Reference:
    """Train ``module`` on the batches of all ranks.

    Args:
        module: A module in fp32, bf16 or fp16; trained in place.
        make_optimizer: Makes the optimizer of a list of fp32 parameters.
        pattern: One rank's training step, without the optimizer.
        batches: For each batch index, one batch per rank.
        steps_at: Whether the optimizer steps after the batch of this index.
        clip: Called with the fp32 parameters that have gradients, before each step.

    Returns:
        The parameters and the gradient norm of every step.
    """
    result = Reference([], [])
    params = list(module.parameters())
    masters = [nn.Parameter(param.detach().float().clone(), param.requires_grad) for param in params]
    optimizer = make_optimizer([master for master in masters if master.requires_grad])
    for param in params:
        if param.requires_grad:
            param.grad_dtype = torch.float32  # the sum of low-precision gradients is not rounded
    for index, ranks in enumerate(batches):
        weight = 1.0 / len(ranks)

        def backward(loss: Tensor, *, gradient: Tensor | None = None, weight: float = weight, **kwargs: Any) -> None:
            # Not (loss * weight).backward(): a leaf loss has no graph, only hooks.
            seed = torch.ones_like(loss) if gradient is None else gradient
            torch.autograd.backward([loss], [seed * weight], **kwargs)

        for batch in ranks:
            pattern(module, batch, backward, index)
        if not steps_at(index):
            continue
        for param, master in zip(params, masters, strict=True):
            param.grad, master.grad = None, param.grad
        with_grad = [master for master in masters if master.grad is not None]
        result.norms.append(float(torch.nn.utils.get_total_norm([m.grad for m in with_grad if m.grad is not None])))
        if clip is not None:
            clip(with_grad)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
        result.params.append([master.detach().clone() for master in masters])
    return result
