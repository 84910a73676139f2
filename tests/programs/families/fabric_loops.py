"""Loops of the user's own under Fabric that read gradients and weights, or run the model, between backwards."""

from __future__ import annotations

from typing import Any

import torch

from tests.programs.fabric_base import backward, fabric_program, loss_of, train, train_on, update
from tests.programs.run import Run


def _predicts(run: Run, fabric: Any, model: Any, batch: Any, name: str) -> None:
    model.eval()
    with torch.inference_mode():
        run.keep(**{name: fabric.all_gather(model(batch[0]))})
    model.train()


@fabric_program(on_three_ranks=True)
def fabric_validates_in_inference_mode(run: Run) -> None:
    """The model runs in `torch.inference_mode()` after each step."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        train_on(fabric, model, optimizer, batch)
        _predicts(run, fabric, model, batch, "after")

    train(run, step)


@fabric_program()
def fabric_samples_in_inference_mode(run: Run) -> None:
    """The same between a forward and its backward, between two backwards, and before the step."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        loss = loss_of(model, batch)
        _predicts(run, fabric, model, batch, "within")
        fabric.backward(loss)
        _predicts(run, fabric, model, batch, "between")
        backward(fabric, model, batch)
        _predicts(run, fabric, model, batch, "before")
        update(optimizer)

    train(run, step)
