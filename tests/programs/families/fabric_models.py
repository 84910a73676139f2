"""Several models, each set up with its own optimizer, under ``lightning.fabric.Fabric``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.programs.fabric_base import (
    adamw,
    fabric_program,
    make_net,
    sgd,
    update,
)
from tests.programs.run import Run


@fabric_program(on_three_ranks=True)
def fabric_gan(run: Run) -> None:
    """A GAN of two models, each set up with its own optimizer."""
    _gan(run)


@fabric_program()
def fabric_gan_by_name(run: Run) -> None:
    """The same, with `fabric.backward(loss, model=model)`."""
    _gan(run, names=True)


def _gan(run: Run, names: bool = False) -> None:
    fabric = run.fabric()
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
    run.compare(nn.ModuleList([generator, critic]))
    make, make_optimizer = fabric.setup(generator, adamw(generator))
    judge, judge_optimizer = fabric.setup(critic, adamw(critic))
    for real, noise in run.loader():
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(make(noise).detach())).mean()
        fabric.backward(loss, **({"model": judge} if names else {}))
        update(judge_optimizer)
        fabric.backward(F.softplus(-judge(make(noise))).mean(), **({"model": make} if names else {}))
        make_optimizer.step()
        make_optimizer.zero_grad()
        judge_optimizer.zero_grad()


@fabric_program(reference="single")  # DDP takes no module without gradients
def fabric_distills(run: Run) -> None:
    """A frozen teacher, set up without an optimizer, and a student."""
    _distill(run)


@fabric_program(reference="single")
def fabric_distills_by_name(run: Run) -> None:
    """The same, with `fabric.backward(loss, model=model)`."""
    _distill(run, names=True)


def _distill(run: Run, names: bool = False) -> None:
    fabric = run.fabric()
    teacher, net = make_net().requires_grad_(False), nn.Linear(8, 4)
    with torch.no_grad():
        net.weight.fill_(0.1)
        net.bias.zero_()
    run.compare(net)
    wise = fabric.setup_module(teacher)
    model, optimizer = fabric.setup(net, sgd(net))
    for batch in run.loader():
        with torch.no_grad():
            wanted = wise(batch[0])
        fabric.backward(F.mse_loss(model(batch[0]), wanted), **({"model": model} if names else {}))
        update(optimizer)


@fabric_program(on_three_ranks=True)
def fabric_encoder_and_decoder(run: Run) -> None:
    """Two modules, set up apart, in one loss: one backward, two steps, each with its own clipping."""
    fabric = run.fabric()
    torch.manual_seed(0)
    encoder, decoder = nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 4)
    run.compare(nn.ModuleList([encoder, decoder]))
    encode, first = fabric.setup(encoder, adamw(encoder))
    decode, second = fabric.setup(decoder, sgd(decoder))
    for inputs, targets in run.loader():
        fabric.backward(F.mse_loss(decode(encode(inputs)), targets))
        run.keep(norm=fabric.clip_gradients(encode, first, max_norm=0.05))
        fabric.clip_gradients(decode, second, clip_val=0.05)
        update(first)
        update(second)


def _two(run: Run) -> tuple[Any, ...]:
    """Fabric, and an encoder and a decoder with their optimizers."""
    fabric = run.fabric()
    torch.manual_seed(0)
    encoder, decoder = nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 4)
    run.compare(nn.ModuleList([encoder, decoder]))
    return fabric, *fabric.setup(encoder, sgd(encoder)), *fabric.setup(decoder, adamw(decoder))


def _train_two(run: Run) -> None:
    fabric, encode, first, decode, second = _two(run)
    for inputs, targets in run.loader():
        fabric.backward(F.mse_loss(decode(encode(inputs)), targets))
        update(first)
        update(second)


@fabric_program(precision="bf16-true")
def fabric_two_models_in_bf16(run: Run) -> None:
    """Two models in one loss, in bf16-true."""
    _train_two(run)


@fabric_program(precision="16-true")
def fabric_two_models_in_fp16(run: Run) -> None:
    """Two models in one loss, in 16-true, where each model has a loss scale of its own."""
    _train_two(run)


@fabric_program()
def fabric_two_models_accumulate(run: Run) -> None:
    """Two models in one loss, two batches per step, the first within `fabric.no_backward_sync` of both."""
    fabric, encode, first, decode, second = _two(run)
    for at, (inputs, targets) in enumerate(run.loader()):
        waits = at % 2 == 0
        with fabric.no_backward_sync(encode, enabled=waits), fabric.no_backward_sync(decode, enabled=waits):
            fabric.backward(F.mse_loss(decode(encode(inputs)), targets) / 2)
        if not waits:
            update(first)
            update(second)


@fabric_program()
def fabric_two_models_step_apart(run: Run) -> None:
    """Three backwards, of which two are of both models, and steps of one model between them."""
    fabric, encode, first, decode, second = _two(run)
    for inputs, targets in run.loader():
        fabric.backward(F.mse_loss(decode(encode(inputs)), targets))
        update(second)
        fabric.backward(encode(inputs).square().mean())
        fabric.backward(F.mse_loss(decode(encode(inputs)), -targets))
        update(second)
        run.keep(norm=fabric.clip_gradients(encode, first, max_norm=0.1))
        update(first)


@fabric_program(precision="16-true")
def fabric_two_models_step_apart_in_fp16(run: Run) -> None:
    """The same in 16-true."""
    fabric_two_models_step_apart(run)


@fabric_program()
def fabric_two_models_clip(run: Run) -> None:
    """Each model's gradients are clipped by its own norm; both norms are kept."""
    fabric, encode, first, decode, second = _two(run)
    norms = []
    for inputs, targets in run.loader():
        fabric.backward(F.mse_loss(decode(encode(inputs)), targets))
        norms.append(fabric.clip_gradients(encode, first, max_norm=0.1))
        norms.append(fabric.clip_gradients(decode, second, max_norm=0.2))
        update(first)
        update(second)
    run.keep(norms=torch.stack(norms))


@fabric_program(reference="single")  # DDP reduces nothing in a second backward of one forward
def fabric_two_models_retain_the_graph(run: Run) -> None:
    """Two models in one loss, whose graph is walked twice."""
    fabric, encode, first, decode, second = _two(run)
    for inputs, targets in run.loader():
        loss = F.mse_loss(decode(encode(inputs)), targets)
        fabric.backward(loss, retain_graph=True)
        fabric.backward(0.5 * loss)
        update(first)
        update(second)


@fabric_program(reference="single", on_three_ranks=True)  # DDP takes no module without gradients
def fabric_three_models(run: Run) -> None:
    """Gradients go from a loss through a frozen model, set up without an optimizer, to another; a third has its own."""
    fabric = run.fabric()
    torch.manual_seed(0)
    first, frozen, other = nn.Linear(8, 6), nn.Linear(6, 4).requires_grad_(False), nn.Linear(8, 4)
    run.compare(nn.ModuleList([first, other]))
    model, optimizer = fabric.setup(first, adamw(first))
    judge = fabric.setup_module(frozen)
    rival, other_optimizer = fabric.setup(other, sgd(other))
    for inputs, targets in run.loader():
        said = rival(inputs)
        fabric.backward(F.mse_loss(judge(model(inputs)), targets) + F.mse_loss(said, targets))
        update(optimizer)
        update(other_optimizer)


@fabric_program(reference="single")
def fabric_freezes_a_model(run: Run) -> None:
    """Two models in one loss, of which one is frozen after two batches; it keeps its weights."""
    fabric, encode, first, decode, second = _two(run)
    for at, (inputs, targets) in enumerate(run.loader()):
        if at == 2:
            encode.module.requires_grad_(False)
        fabric.backward(F.mse_loss(decode(encode(inputs)), targets))
        update(first)
        update(second)


@fabric_program()
def fabric_two_models_after_a_collective(run: Run) -> None:
    """`torch.distributed.broadcast` of weights between the forward of two models and the backward of both."""
    fabric, encode, first, decode, second = _two(run)
    for inputs, targets in run.loader():
        loss = F.mse_loss(decode(encode(inputs)), targets)
        for param in (*encode.module.parameters(), *decode.module.parameters()):
            dist.broadcast(param, 0)
        fabric.backward(loss)
        update(first)
        update(second)


@fabric_program(on_three_ranks=True)
def fabric_samples_of_two_models(run: Run) -> None:
    """Rank 0 alone runs the first model, then the second; `dist.barrier()`."""
    fabric = run.fabric()
    nets = [make_net(), nn.Linear(4, 2)]
    run.compare(nn.ModuleList(nets))
    first, second = (fabric.setup(net, sgd(net)) for net in nets)
    for x, y in run.loader():
        fabric.backward(F.mse_loss(second[0](first[0](x)), y[:, :2]))
        for _, optimizer in (first, second):
            update(optimizer)
        if fabric.is_global_zero:
            with torch.no_grad():
                second[0](first[0](x))
        dist.barrier()
