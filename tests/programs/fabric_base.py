"""A small network and a loop under ``lightning.fabric.Fabric``, which programs are built on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.program import program
from tests.programs.run import Run

#: There is no strategy of ours for Fabric and FSDP2.
fabric_program = partial(program, without=("fsdp*",))
#: ``step(fabric, model, optimizer, batch)``.
Step = Callable[[Any, Any, Any, Any], None]


def make_net() -> nn.Module:
    """A network for inputs ``(rows, 8)`` and targets ``(rows, 4)``."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(net.parameters(), 0.02)


def loss_of(model: Any, batch: Any) -> Tensor:
    """The squared error."""
    out = model(batch[0])
    return F.mse_loss(out, batch[1].to(out.device))


def update(optimizer: Any) -> None:
    """Step and zero the gradients."""
    optimizer.step()
    optimizer.zero_grad()


def backward(fabric: Any, model: Any, batch: Any) -> None:
    """Forward and backward."""
    fabric.backward(loss_of(model, batch))


def train_on(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
    """Forward, backward and step."""
    backward(fabric, model, batch)
    update(optimizer)


def train(
    run: Run,
    step: Step = train_on,
    make: Callable[[nn.Module], Any] = sgd,
    net: nn.Module | None = None,
    moved: bool = True,
) -> None:
    """Four batches, each by ``step``, which are on the model's device if ``moved``."""
    fabric = run.fabric()
    net = make_net() if net is None else net
    run.compare(net)
    model, optimizer = fabric.setup(net, make(net))
    for batch in run.loader(moved=moved):
        step(fabric, model, optimizer, batch)
