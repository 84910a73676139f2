"""Loops of the user's own, under ``lightning.fabric.Fabric``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.fabric_base import (
    adamw,
    backward,
    fabric_program,
    loss_of,
    make_net,
    sgd,
    train,
    train_on,
    update,
)
from tests.programs.program import Refusal
from tests.programs.run import Run


@fabric_program(on_three_ranks=True)
def fabric_loop(run: Run) -> None:
    """Forward, backward, AdamW, and a schedule."""
    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    model, optimizer = fabric.setup(net, adamw(net))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for batch in run.loader(moved=False):
        loss = loss_of(model, batch)
        fabric.backward(loss)
        update(optimizer)
        schedule.step()
        losses.append(fabric.all_reduce(loss.detach()))
    run.keep(losses=torch.stack(losses), lr=optimizer.param_groups[0]["lr"])


@fabric_program()
def fabric_accumulates(run: Run) -> None:
    """Two batches per step, the first within `fabric.no_backward_sync`."""
    seen = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        seen.append(batch)
        waits = len(seen) % 2 == 1
        with fabric.no_backward_sync(model, enabled=waits):
            fabric.backward(loss_of(model, batch) / 2)
        if not waits:
            update(optimizer)

    train(run, step)


@fabric_program()
def fabric_clips(run: Run) -> None:
    """`fabric.clip_gradients` by norm, which is kept, and by value."""
    norms = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        backward(fabric, model, batch)
        if len(norms) < 2:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.2))
        else:
            fabric.clip_gradients(model, optimizer, clip_val=0.02)
            norms.append(torch.tensor(0.0, device=fabric.device))
        update(optimizer)

    train(run, step)
    run.keep(norms=torch.stack(norms))


@fabric_program()
def fabric_clips_by_torch(run: Run) -> None:
    """`torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        backward(fabric, model, batch)
        run.keep(norm=torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2))
        update(optimizer)

    train(run, step)


@fabric_program(on_three_ranks=True)
def fabric_edits_gradients(run: Run) -> None:
    """Gradients are scaled in place, reduced over the ranks once more, and assigned."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        backward(fabric, model, batch)
        for number, param in enumerate(model.parameters()):
            if number % 2:
                param.grad.mul_(0.5)
            else:
                param.grad = fabric.all_reduce(param.grad, reduce_op="mean") + 0.01
        update(optimizer)

    train(run, step)


@fabric_program(reference="single")
def fabric_two_optimizers(run: Run) -> None:
    """One module, an optimizer for each of its layers, which step in turns."""
    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    made = [torch.optim.SGD(net[at].parameters(), 0.1, momentum=0.9) for at in (0, 2)]  # type: ignore[index]
    model, *optimizers = fabric.setup(net, *made)
    for number, batch in enumerate(run.loader()):
        fabric.backward(loss_of(model, batch))
        optimizers[number % 2].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@fabric_program(reference="single")
def fabric_unfreezes(run: Run) -> None:
    """A layer is frozen for two batches."""

    def frozen_at_first(net: nn.Module) -> Any:
        net[0].requires_grad_(False)  # type: ignore[index]
        return adamw(net)

    count = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        count.append(batch)
        if len(count) == 3:
            model.module[0].requires_grad_(True)
        train_on(fabric, model, optimizer, batch)

    train(run, step, frozen_at_first)


@fabric_program(on_three_ranks=True)
def fabric_never_zeroed(run: Run) -> None:
    """No `zero_grad()`, with clipping, whose norm is kept, and the last gradient read in the end."""
    norms = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        backward(fabric, model, batch)
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=1.0))
        optimizer.step()
        if len(norms) == 4:
            run.keep(norms=torch.stack(norms), last=model.module[0].weight.grad)

    train(run, step, lambda net: torch.optim.SGD(net.parameters(), 0.05))


@fabric_program()
def fabric_bare_backward(run: Run) -> None:
    """`loss.backward()`, without Fabric."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        loss_of(model, batch).backward()
        update(optimizer)

    train(run, step)


@fabric_program(precision="16-true")
def fabric_bare_backward_in_fp16(run: Run) -> None:
    """`loss.backward()` in 16-true, where Fabric's scales the loss."""
    fabric_bare_backward(run)


@fabric_program()
def fabric_penalty(run: Run) -> None:
    """A gradient penalty by `create_graph=True`."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        fabric.backward(loss_of(model, batch) + 0.01 * slope.square().sum())
        update(optimizer)

    train(run, step)


@fabric_program()
def fabric_validates(run: Run) -> None:
    """Predictions are gathered between the steps, in `eval()` and without gradients."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        train_on(fabric, model, optimizer, batch)
        model.eval()
        with torch.no_grad():
            run.keep(predictions=fabric.all_gather(model(batch[0])))
        model.train()

    train(run, step)


@fabric_program()
def fabric_optimizer_states(run: Run) -> None:
    """Moments are halved, and settings are changed, through the optimizer."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        train_on(fabric, model, optimizer, batch)
        for param in model.parameters():
            optimizer.state[param]["exp_avg"].mul_(0.5)
        optimizer.param_groups[0]["lr"] *= 0.9

    train(run, step, adamw)


def _closure(fabric: Any, model: Any, optimizer: Any, batch: Any) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        fabric.backward(loss)
        return loss

    return closure


@fabric_program()
def fabric_closure(run: Run) -> None:
    """`optimizer.step(closure)`."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        run.keep(loss=fabric.all_reduce(optimizer.step(_closure(fabric, model, optimizer, batch)).detach()))

    train(run, step)


@fabric_program(refused={"stage[123]*": Refusal("MisconfigurationException", r"LBFGS.*strategy='zeroplus_stage0'")})
def fabric_lbfgs(run: Run) -> None:
    """LBFGS, with a closure."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.step(_closure(fabric, model, optimizer, batch))

    train(run, step, lambda net: torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3))


@fabric_program()
def fabric_zeroes_by_module(run: Run) -> None:
    """`model.zero_grad()`, and at times `model.module.zero_grad(set_to_none=False)`."""
    count = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        count.append(batch)
        if len(count) % 2:
            model.zero_grad()
        else:
            model.module.zero_grad(set_to_none=False)
        backward(fabric, model, batch)
        backward(fabric, model, batch)
        optimizer.step()

    train(run, step)


@fabric_program()
def fabric_drops_gradients(run: Run) -> None:
    """Gradients of a first backward are dropped by `model.zero_grad()`, and others come."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        fabric.backward(7 * loss_of(model, batch))
        model.zero_grad()
        train_on(fabric, model, optimizer, batch)

    train(run, step)


@fabric_program(reference="ddp_find_unused_parameters_true")
def fabric_freezes(run: Run) -> None:
    """A layer is frozen after two batches; it keeps its weights, and what it had of momentum is not used."""
    count = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        count.append(batch)
        if len(count) == 3:
            model.module[0].requires_grad_(False)
        train_on(fabric, model, optimizer, batch)

    train(run, step)


@fabric_program(reference="single")
def fabric_takes_turns(run: Run) -> None:
    """Ranks run one of two heads, as experts do."""
    fabric = run.fabric()
    torch.manual_seed(0)
    net = nn.ModuleDict({"trunk": nn.Linear(8, 6), "a": nn.Linear(6, 4), "b": nn.Linear(6, 4)})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor, which: str) -> Tensor:
            return self.net[which](self.net["trunk"](x))

    whole = Both()
    run.compare(whole)
    model, optimizer = fabric.setup(whole, sgd(whole))
    for at, (inputs, targets) in enumerate(run.loader(8)):
        size = len(inputs) // (dist.get_world_size() if run.alone else 1)
        parts = list(zip(inputs.split(size), targets.split(size), strict=True))
        losses = [F.mse_loss(model(x, "ab"[(at + run.rank + number) % 2]), y) for number, (x, y) in enumerate(parts)]
        fabric.backward(torch.stack(losses).mean())
        update(optimizer)


@fabric_program()
def fabric_skips_steps(run: Run) -> None:
    """Gradients of two batches of four are thrown away, and a step comes without any."""
    count = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        count.append(batch)
        backward(fabric, model, batch)
        if len(count) % 2:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()

    train(run, step)


@fabric_program(
    precision="64-true",
    reference_precision="64-true",
    refused={"stage[123]*": Refusal("MisconfigurationException", r"64-true.*strategy='zeroplus_stage0'")},
)
def fabric_double(run: Run) -> None:
    """64-true."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        assert all(param.dtype == torch.float64 for param in model.parameters())
        train_on(fabric, model, optimizer, batch)

    train(run, step)


@fabric_program()
def fabric_sets_up_apart(run: Run) -> None:
    """`fabric.setup_module` and `fabric.setup_optimizers`."""
    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    model, optimizer = fabric.setup_module(net), fabric.setup_optimizers(sgd(net))
    for batch in run.loader():
        train_on(fabric, model, optimizer, batch)


@fabric_program()
def fabric_runs_before_its_optimizer(run: Run) -> None:
    """A module is set up and run, and gets AdamW from `fabric.setup_optimizers` after that."""
    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    model = fabric.setup_module(net)
    with torch.no_grad():
        run.keep(before=model(torch.ones(2, 8, device=fabric.device)).sum())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), 0.01))
    for index, (x, y) in enumerate(run.loader()):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            fabric.backward(F.mse_loss(model(x), y))
        if index % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()


@fabric_program()
def fabric_gan_set_up_apart(run: Run) -> None:
    """Two models and an optimizer for each, all four set up apart; a third model has no optimizer."""
    fabric = run.fabric()
    generator, critic, judge = nn.Linear(8, 4), nn.Linear(4, 1), nn.Linear(1, 1)
    for net in (generator, critic):
        run.compare(net)
    models = [fabric.setup_module(net) for net in (generator, critic)]
    fixed = fabric.setup_module(judge)
    first, second = fabric.setup_optimizers(sgd(generator), sgd(critic))
    for x, y in run.loader():
        fabric.backward(F.softplus(-fixed(models[1](models[0](x)))).mean())
        first.step()
        for optimizer in (first, second):
            optimizer.zero_grad()
        with torch.no_grad():
            fake = models[0](x)
        fabric.backward((models[1](fake) - models[1](y)).mean())
        second.step()
        for optimizer in (first, second):
            optimizer.zero_grad()


@fabric_program(reference="single")  # DDP takes no module without gradients
def fabric_only_inputs(run: Run) -> None:
    """`fabric.backward` to the inputs of a frozen model, without any optimizer."""
    fabric = run.fabric()
    model = fabric.setup_module(make_net().requires_grad_(False))
    x = torch.ones(2, 8, requires_grad=True)
    fabric.backward(model(x).square().sum())
    assert x.grad is not None and x.grad.abs().sum() > 0
    run.keep(grad=x.grad)
