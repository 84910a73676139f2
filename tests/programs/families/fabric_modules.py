"""Modules, weights and checkpoints under ``lightning.fabric.Fabric``."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import lightning_zeroplus as zp
from tests.programs.fabric_base import (
    adamw,
    backward,
    fabric_program,
    make_net,
    sgd,
    train,
    train_on,
    update,
)
from tests.programs.program import Refusal
from tests.programs.run import Run


@fabric_program()
def fabric_saves(run: Run) -> None:
    """`fabric.save` after two batches, and `fabric.load` into a new module, which goes on."""
    fabric = run.fabric()
    net = make_net()
    model, optimizer = fabric.setup(net, adamw(net))
    batches = list(run.loader())
    for batch in batches[:2]:
        train_on(fabric, model, optimizer, batch)
    path = run.folder / "saved"
    fabric.save(path, {"model": model, "optimizer": optimizer, "at": 2})

    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    model, optimizer = fabric.setup(net, adamw(net))
    state = {"model": model, "optimizer": optimizer, "at": 0}
    fabric.load(path, state)
    assert state["at"] == 2
    for batch in batches[2:]:
        train_on(fabric, model, optimizer, batch)


@fabric_program()
def fabric_saves_a_schedule(run: Run) -> None:
    """A schedule is saved and loaded as `"lr_scheduler"`, a name that DeepSpeed's files have, too."""
    path = run.folder / "saved"
    for at in range(2):
        fabric = run.fabric()
        net = make_net()
        run.compare(net)
        model, optimizer = fabric.setup(net, sgd(net))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        state = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule}
        if at:
            fabric.load(path, state)
        for batch in list(run.loader())[2 * at : 2 * at + 2]:
            train_on(fabric, model, optimizer, batch)
            schedule.step()
        run.keep(epoch=schedule.last_epoch, lr=optimizer.param_groups[0]["lr"])
        fabric.save(path, state)


class _WithALoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])


@fabric_program()
def fabric_forward_method(run: Run) -> None:
    """A method of the module's own, marked as one that runs forwards."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        model.mark_forward_method("loss")
        fabric.backward(model.loss(batch))
        update(optimizer)

    train(run, step, net=_WithALoss())


@fabric_program(reference="single")
def fabric_set_up_again(run: Run) -> None:
    """After two batches with AdamW the module is set up again, with SGD."""
    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    batches = list(run.loader())
    for make, some in ((adamw, batches[:2]), (sgd, batches[2:])):
        model, optimizer = fabric.setup(net, make(net))
        for batch in some:
            train_on(fabric, model, optimizer, batch)


class _Complex(nn.Module):
    """A phase per feature, which is a complex number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.register_buffer("phase", torch.polar(torch.ones(8), torch.arange(8.0)))

    def forward(self, x: Tensor) -> Tensor:
        assert self.phase.is_complex()
        return self.net((x * self.phase).real)


@fabric_program()
def fabric_complex_buffer(run: Run) -> None:
    """A complex buffer, in 32-true: Lightning's plugin for DeepSpeed drops the imaginary part."""
    train(run, net=_Complex())


@fabric_program()
def fabric_float64_input(run: Run) -> None:
    """Inputs and outputs of float64, which the module itself rounds, in 32-true."""

    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net((x - 1e6).float()).double()

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        out = model(batch[0].double() + 1e6)
        assert out.dtype == torch.float64
        fabric.backward(F.mse_loss(out, batch[1].double()))
        update(optimizer)

    train(run, step, net=Rounds())


@fabric_program(precision="bf16-true", reference_precision="bf16-true")
def fabric_default_dtype(run: Run) -> None:
    """New tensors within forward() are of the precision's dtype, in bf16-true."""

    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def forward(self, x: Tensor) -> Tensor:
            assert torch.zeros(1).dtype == torch.bfloat16
            return self.net(torch.cat([x[:, :4], torch.ones(len(x), 4, device=x.device)], 1))

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        out = model(batch[0])
        assert out.dtype == torch.float32
        fabric.backward(F.mse_loss(out, batch[1]))
        update(optimizer)

    train(run, step, net=Makes())


@fabric_program()
def fabric_copies(run: Run) -> None:
    """`copy.deepcopy` of the module after two batches: an ordinary module, which a plain loop trains on."""
    copies: list[Any] = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        train_on(fabric, model, optimizer, batch)
        copies.append(copy.deepcopy(model.module))

    train(run, step)
    copied = copies[1]
    optimizer = sgd(copied)
    for _ in range(2):
        copied(torch.ones(4, 8, device=run.device)).square().mean().backward()
        update(optimizer)
    run.compare(copied)


@fabric_program()
def fabric_init_module(run: Run) -> None:
    """The module is built under `fabric.init_module()`."""
    fabric = run.fabric()
    with fabric.init_module():
        net = make_net()
    run.compare(net)
    model, optimizer = fabric.setup(net, sgd(net))
    for batch in run.loader():
        train_on(fabric, model, optimizer, batch)


@fabric_program(precision="bf16-true", reference_precision="bf16-true")
def fabric_init_module_in_bf16(run: Run) -> None:
    """The same in bf16-true: weights are drawn in bf16, and a buffer has its dtype."""
    fabric = run.fabric()
    torch.manual_seed(0)
    with fabric.init_module():
        net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    assert net[1].running_mean.dtype == torch.bfloat16  # type: ignore[union-attr]
    run.keep(**{name.replace(".", "_"): value.float() for name, value in run.state(net).items()})
    run.compare(net)
    model, optimizer = fabric.setup(net, sgd(net))
    for batch in run.loader():
        train_on(fabric, model, optimizer, batch)


@fabric_program()
def fabric_loads_raw(run: Run) -> None:
    """`fabric.init_module(empty_init=True)`, and `fabric.load_raw` of a state dict after `setup`."""
    path = run.folder / "weights.pt"
    if run.rank == 0:
        torch.save(make_net().state_dict(), path)
    fabric = run.fabric()
    fabric.barrier()
    with fabric.init_module(empty_init=True):
        assert not nn.init.uniform_(torch.zeros(1), 1, 2), "nothing is initialized"
        net = make_net()
    with zp.gathered(net), torch.no_grad():
        for param in net.parameters():
            param.fill_(0.5)  # in place of whatever was in the memory, to which the update is compared
    run.compare(net)
    model, optimizer = fabric.setup(net, sgd(net))
    fabric.load_raw(path, model)
    for batch in run.loader():
        train_on(fabric, model, optimizer, batch)


@fabric_program()
def fabric_broadcasts_weights(run: Run) -> None:
    """Rank 0's weights are broadcast after a step, by `fabric.broadcast` of a state dict."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        train_on(fabric, model, optimizer, batch)
        state = fabric.broadcast({name: value.clone() for name, value in model.module.state_dict().items()})
        model.module.load_state_dict({name: value * 0.9 for name, value in state.items()})

    train(run, step)


@fabric_program()
def fabric_compiled(run: Run) -> None:
    """`torch.compile` before `setup`."""
    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    model, optimizer = fabric.setup(torch.compile(net, backend="eager"), sgd(net))
    for batch in run.loader():
        train_on(fabric, model, optimizer, batch)


@fabric_program(reference="single")  # DDP reduces nothing then
def fabric_inner_module(run: Run) -> None:
    """Forwards by the user's own module, not by what `setup` returns."""
    net = make_net()

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        train_on(fabric, net, optimizer, batch)

    train(run, step, net=net)


@fabric_program()
def fabric_launches(run: Run) -> None:
    """`fabric.launch(function)`, loaders by `fabric.setup_dataloaders`, and a barrier."""

    def main(fabric: Any) -> None:
        net = make_net()
        run.compare(net)
        model, optimizer = fabric.setup(net, sgd(net))
        for batch in fabric.setup_dataloaders(run.loader(), use_distributed_sampler=False):
            backward(fabric, model, batch)
            update(optimizer)
        fabric.barrier()

    fabric = run.fabric()
    main(fabric)


@fabric_program()
def fabric_checkpointed_layers(run: Run) -> None:
    """Activations are recomputed in the backward."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        fabric.backward(F.mse_loss(checkpoint(model, batch[0], use_reentrant=False), batch[1]))
        update(optimizer)

    train(run, step)


@fabric_program()
def fabric_samples_on_one_rank(run: Run) -> None:
    """Rank 0 alone runs the model without gradients between two batches."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        train_on(fabric, model, optimizer, batch)
        if fabric.is_global_zero:
            with torch.no_grad():
                model.module(batch[0])
        fabric.barrier()

    train(run, step)


@fabric_program(on_three_ranks=True)
def fabric_samples_before_the_step(run: Run) -> None:
    """Rank 0 alone runs the model between a backward and the step."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        backward(fabric, model, batch)
        if fabric.is_global_zero:
            with torch.no_grad():
                model.module(batch[0])
        update(optimizer)

    train(run, step)


@fabric_program()
def fabric_writes_weights(run: Run) -> None:
    """Weights are clamped after each step, and decayed by hand before the next forward."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.95)
        train_on(fabric, model, optimizer, batch)
        for param in model.parameters():
            param.data.clamp_(-0.3, 0.3)

    train(run, step)


@fabric_program()
def fabric_average(run: Run) -> None:
    """An exponential average of the weights, in a copy that is made before `setup`."""
    average = make_net()

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        train_on(fabric, model, optimizer, batch)
        with torch.no_grad():
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(param, 0.2)

    train(run, step)
    run.compare(average)


@fabric_program()
def fabric_reads_weights(run: Run) -> None:
    """`model.state_dict()` and a norm of the weights, after each step."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        train_on(fabric, model, optimizer, batch)
        run.keep(norm=sum(param.detach().square().sum() for param in model.parameters()))
        state = model.state_dict()
        run.keep(**{name.replace(".", "_"): value for name, value in state.items()})

    train(run, step)


@fabric_program()
def fabric_averages_its_model(run: Run) -> None:
    """`AveragedModel` of what `fabric.setup` has returned: updated after each step, and evaluated."""
    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    model, optimizer = fabric.setup(net, adamw(net))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for batch in run.loader(4):
        train_on(fabric, model, optimizer, batch)
        average.update_parameters(model)
    with torch.no_grad():
        run.keep(mean=average(torch.ones(2, 8, device=fabric.device)).sum())
    run.keep(**dict(average.module.module.named_parameters()))


@fabric_program()
def fabric_copies_its_model(run: Run) -> None:
    """`copy.deepcopy(model)` of what `fabric.setup` has returned is the teacher in the next loss."""
    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    model, optimizer = fabric.setup(net, sgd(net))
    for index, (x, y) in enumerate(run.loader(4)):
        if index % 2 == 0:
            teacher = copy.deepcopy(model).requires_grad_(False)
        fabric.backward(F.mse_loss(model(x), y.to(fabric.device)) + F.mse_loss(model(x), teacher(x)))
        update(optimizer)


_WITHOUT = Refusal("RuntimeError|PartitionedWeightError", "setup_optimizers|partitioned")


@fabric_program(refused={"stage*": _WITHOUT})
def fabric_steps_an_optimizer_of_its_own(run: Run) -> None:
    """The module alone is set up; `loss.backward()`, and a torch optimizer that Fabric has never seen."""
    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    model = fabric.setup_module(net)
    optimizer = sgd(net)
    for x, y in run.loader(4):
        F.mse_loss(model(x), y.to(fabric.device)).backward()
        update(optimizer)


def _adversaries(run: Run, by_one_rank: bool) -> None:
    fabric = run.fabric()
    generator, critic = nn.Linear(8, 4), nn.Linear(4, 1)
    for net in (generator, critic):
        run.compare(net)
    models = [fabric.setup_module(net) for net in (generator, critic)]
    optimizers = fabric.setup_optimizers(sgd(generator), sgd(critic))
    views = [param.data for net in (generator, critic) for param in net.parameters()]
    sums = torch.zeros(4, device=fabric.device)
    if by_one_rank and fabric.global_rank:
        views = []
    for x, y in run.loader():
        for at, optimizer in enumerate(optimizers):
            fake = models[1](models[0](x))
            fabric.backward(F.softplus(fake if at else -fake).mean() + F.softplus(-models[1](y)).mean())
            optimizer.step()
            for each in optimizers:
                each.zero_grad()
            for index, view in enumerate(views):
                sums[index] += view.abs().sum()
    run.keep(sums=fabric.broadcast(sums))


@fabric_program()
def fabric_gan_kept(run: Run) -> None:
    """Two models, set up apart, each with an optimizer; tensors of their weights are kept and read after each step."""
    _adversaries(run, by_one_rank=False)


@fabric_program()
def fabric_gan_kept_by_one_rank(run: Run) -> None:
    """The same, where rank 0 alone keeps the tensors."""
    _adversaries(run, by_one_rank=True)
