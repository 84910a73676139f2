"""Loops of the user's own under Fabric that read gradients and weights, or run the model, between backwards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap

from tests.programs.fabric_base import adamw, backward, fabric_program, loss_of, train, train_on, update
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


def _votes(run: Run, fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
    with fabric.no_backward_sync(model):
        backward(fabric, model, batch)
        backward(fabric, model, batch)
    norms = torch.stack([param.grad.norm() for param in model.parameters()])
    run.keep(norms=fabric.all_gather(norms))
    for number, param in enumerate(model.parameters()):
        votes = fabric.all_reduce(param.grad.sign(), reduce_op="sum").sign()
        if number % 2:
            param.grad = votes
        else:
            param.grad.copy_(votes)
    update(optimizer)


@fabric_program(on_three_ranks=True)
def fabric_votes(run: Run) -> None:
    """After `fabric.no_backward_sync`, each rank reads its own gradients; the signs of most ranks are the gradient."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        _votes(run, fabric, model, optimizer, batch)

    train(run, step, adamw)


@fabric_program(stays=("2.bias",))
def fabric_averages_by_hand(run: Run) -> None:
    """The same with `dist.all_reduce(param.grad)`, clipped; that of a bias is set to None."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        with fabric.no_backward_sync(model):
            backward(fabric, model, batch)
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        model.module[2].bias.grad = None
        fabric.clip_gradients(model, optimizer, max_norm=0.3)
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        run.keep(norm=torch.stack([grad.float().norm() for grad in grads]).norm())
        update(optimizer)

    train(run, step, lambda net: torch.optim.SGD(net.parameters(), 0.5))


@fabric_program(stays=("2.bias",), precision="16-true", bound=2e-2)
def fabric_averages_by_hand_in_fp16(run: Run) -> None:
    """The same in 16-true, where gradients are scaled."""
    fabric_averages_by_hand(run)


@fabric_program(stays=("2.bias",), precision="bf16-true")
def fabric_averages_by_hand_in_bf16(run: Run) -> None:
    """The same in bf16-true."""
    fabric_averages_by_hand(run)


@fabric_program(reference="single")  # DDP does not average what comes without its forward
def fabric_clips_per_sample(run: Run) -> None:
    """`vmap` of `grad` of `functional_call` with detached weights: the gradient of each sample is clipped."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        net = model.module

        def of_one(params: Any, x: Any, y: Any) -> Any:
            return F.mse_loss(functional_call(net, params, (x[None],)), y[None])

        found = vmap(grad(of_one), in_dims=(None, 0, 0))({n: p.detach() for n, p in net.named_parameters()}, *batch)
        for name, param in net.named_parameters():
            norms = found[name].flatten(1).norm(dim=1).clamp(min=0.1)
            mean = torch.einsum("n...,n->...", found[name], 1 / norms) / len(norms)
            param.grad = fabric.all_reduce(mean, reduce_op="mean")
        run.keep(loss=fabric.all_reduce(loss_of(model, batch).detach(), reduce_op="mean"))
        update(optimizer)

    train(run, step)
