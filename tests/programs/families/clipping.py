"""A gradient that is clipped more than once before a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch import nn

from tests.programs.base import Manual, Regression, step
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


def _two_optimizers(run: Run) -> tuple[Any, Any, list[Any]]:
    """A model, and an optimizer for each of its layers."""
    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    made = [adamw(net[0]), torch.optim.SGD(net[2].parameters(), 0.1)]  # type: ignore[index]
    model, *optimizers = fabric.setup(net, *made)
    return fabric, model, optimizers


@fabric_program()
def fabric_clips_by_norm_then_value(run: Run) -> None:
    """`fabric.clip_gradients` of one of two optimizers by norm, then by value."""
    fabric, model, optimizers = _two_optimizers(run)
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


def _clips_by(norm_type: float, limit: float) -> Any:
    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        backward(fabric, model, batch)
        kept.append(fabric.clip_gradients(model, optimizer, max_norm=limit, norm_type=norm_type))
        update(optimizer)

    kept: list[torch.Tensor] = []
    return step, kept


@fabric_program(on_three_ranks=True)
def fabric_clips_by_largest(run: Run) -> None:
    """`fabric.clip_gradients(max_norm=..., norm_type=inf)`, whose norm is kept."""
    step, norms = _clips_by(torch.inf, 0.05)
    train(run, step)
    run.keep(norms=torch.stack(norms))


@fabric_program(precision="16-true", bound=2e-2)
def fabric_clips_by_largest_in_fp16(run: Run) -> None:
    """The same in 16-true, where gradients are scaled until the step."""
    step, norms = _clips_by(torch.inf, 0.05)
    train(run, step)
    run.keep(norms=torch.stack(norms).float())


@fabric_program(precision="bf16-true")
def fabric_clips_by_largest_in_bf16(run: Run) -> None:
    """The same in bf16-true."""
    step, norms = _clips_by(torch.inf, 0.05)
    train(run, step, lambda net: torch.optim.SGD(net.parameters(), 1.0))
    run.keep(norms=torch.stack(norms).float())


@fabric_program(on_three_ranks=True)
def fabric_clips_by_other_norms(run: Run) -> None:
    """`fabric.clip_gradients(norm_type=...)` of each of two optimizers: 1 and 3, then 0.5, then by value and L2."""
    fabric, model, optimizers = _two_optimizers(run)
    norms = []
    for batch in run.loader():
        fabric.backward(loss_of(model, batch))
        for norm_type, optimizer in zip((1, 3), optimizers, strict=True):
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.2, norm_type=norm_type))
        norms.append(fabric.clip_gradients(model, optimizers[0], max_norm=0.5, norm_type=0.5))
        fabric.clip_gradients(model, optimizers[1], clip_val=0.05)
        norms.append(fabric.clip_gradients(model, optimizers[1], max_norm=0.1))
        for optimizer in optimizers:
            update(optimizer)
    run.keep(norms=torch.stack(norms))


@fabric_program(on_three_ranks=True)
def fabric_clips_each_backward(run: Run) -> None:
    """What is accumulated is clipped after each of two backwards, by norm or by value."""
    norms = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        for part in range(2):
            backward(fabric, model, [tensor[part::2] for tensor in batch])
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.2 + 0.1 * part))
        if len(norms) % 4 == 0:
            fabric.clip_gradients(model, optimizer, clip_val=0.02)
            loss_of(model, batch).backward()
        update(optimizer)

    train(run, step)
    run.keep(norms=torch.stack(norms))


@fabric_program(precision="16-true", bound=2e-2)
def fabric_clips_each_backward_in_fp16(run: Run) -> None:
    """The same in 16-true."""
    fabric_clips_each_backward(run)


@fabric_program(precision="bf16-true")
def fabric_clips_each_backward_in_bf16(run: Run) -> None:
    """The same in bf16-true."""
    fabric_clips_each_backward(run)


@fabric_program()
def fabric_clips_some_of_each_backward(run: Run) -> None:
    """Two optimizers, of which one clips after each of two backwards."""
    fabric, model, optimizers = _two_optimizers(run)
    for batch in run.loader():
        for _ in range(2):
            fabric.backward(loss_of(model, batch))
            fabric.clip_gradients(model, optimizers[1], max_norm=0.1)
        for optimizer in optimizers:
            update(optimizer)


@program()
class clips_each_backward(Manual):
    """`self.clip_gradients` after each of two backwards of a step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 0.1, "norm")
        step(optimizer)


@fabric_program(reference="single")
def fabric_clips_each_backward_of_parts(run: Run) -> None:
    """The same where ranks run one of two heads."""
    fabric = run.fabric()
    net = TwoHeads()
    run.compare(net)
    model, optimizer = fabric.setup(net, adamw(net))
    for at, (inputs, targets) in enumerate(run.loader(8)):
        size = len(inputs) // (dist.get_world_size() if run.alone else 1)
        parts = list(zip(inputs.split(size), targets.split(size), strict=True))
        for turn in range(2):
            losses = [F.mse_loss(model(x, "ab"[(at + turn + run.rank + n) % 2]), y) for n, (x, y) in enumerate(parts)]
            fabric.backward(torch.stack(losses).mean())
            fabric.clip_gradients(model, optimizer, max_norm=0.2)
        update(optimizer)


class TwoHeads(nn.Module):
    """Of which each forward runs one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.ModuleDict({"trunk": nn.Linear(8, 6), "a": nn.Linear(6, 4), "b": nn.Linear(6, 4)})

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return self.net[which](self.net["trunk"](x))
