"""A gradient that is clipped more than once before a step."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.enums import GradClipAlgorithmType

from tests.programs.base import Regression
from tests.programs.fabric_base import adamw, backward, fabric_program, loss_of, make_net, train, update
from tests.programs.program import program
from tests.programs.run import Run


@fabric_program()
def fabric_clips_by_value_then_norm(run: Run) -> None:
    """`fabric.clip_gradients` by value, then by norm, which is that of the clamped gradients."""
    norms = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        backward(fabric, model, batch)
        fabric.clip_gradients(model, optimizer, clip_val=0.05)
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.1))
        update(optimizer)

    train(run, step)
    run.keep(norms=torch.stack(norms))


@fabric_program()
def fabric_clips_by_norm_then_value(run: Run) -> None:
    """`fabric.clip_gradients` of one of two optimizers by norm, then by value."""
    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    made = [adamw(net[0]), torch.optim.SGD(net[2].parameters(), 0.1)]  # type: ignore[index]
    model, *optimizers = fabric.setup(net, *made)
    for batch in run.loader():
        fabric.backward(loss_of(model, batch))
        fabric.clip_gradients(model, optimizers[1], max_norm=0.1)
        fabric.clip_gradients(model, optimizers[1], clip_val=0.02)
        for optimizer in optimizers:
            update(optimizer)


@program({"gradient_clip_val": 0.1})
class clips_by_norm_then_value(Regression):
    """`configure_gradient_clipping` clips by norm, then by value."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # Lightning's `self.clip_gradients` takes the one algorithm that the Trainer has.
        for limit, algorithm in ((0.1, GradClipAlgorithmType.NORM), (0.02, GradClipAlgorithmType.VALUE)):
            self.trainer.precision_plugin.clip_gradients(optimizer, limit, algorithm)
