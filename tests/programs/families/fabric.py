"""Loops of the user's own, under ``lightning.fabric.Fabric``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.programs.program import Refusal, program
from tests.programs.run import Run

#: There is no strategy of ours for Fabric and FSDP2.
fabric_program = partial(program, without=("fsdp*",))
_Step = Callable[[Any, Any, Any, Any], None]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def _adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), 0.02)


def _loss(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _update(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _backward(fabric: Any, model: Any, batch: Any) -> None:
    fabric.backward(_loss(model, batch))


def _step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
    _backward(fabric, model, batch)
    _update(optimizer)


def _train(
    run: Run, step: _Step = _step, make: Callable[[nn.Module], Any] = _sgd, net: nn.Module | None = None
) -> None:
    """Four batches: ``step(fabric, model, optimizer, batch)``."""
    fabric = run.fabric()
    net = _net() if net is None else net
    run.compare(net)
    model, optimizer = fabric.setup(net, make(net))
    for batch in run.loader():
        step(fabric, model, optimizer, batch)


@fabric_program(on_three_ranks=True)
def fabric_loop(run: Run) -> None:
    """Forward, backward, AdamW, and a schedule."""
    fabric = run.fabric()
    net = _net()
    run.compare(net)
    model, optimizer = fabric.setup(net, _adamw(net))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for batch in run.loader():
        loss = _loss(model, batch)
        fabric.backward(loss)
        _update(optimizer)
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
            fabric.backward(_loss(model, batch) / 2)
        if not waits:
            _update(optimizer)

    _train(run, step)


@fabric_program()
def fabric_clips(run: Run) -> None:
    """`fabric.clip_gradients` by norm, which is kept, and by value."""
    norms = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        _backward(fabric, model, batch)
        if len(norms) < 2:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.2))
        else:
            fabric.clip_gradients(model, optimizer, clip_val=0.02)
            norms.append(torch.tensor(0.0))
        _update(optimizer)

    _train(run, step)
    run.keep(norms=torch.stack(norms))


@fabric_program()
def fabric_clips_by_torch(run: Run) -> None:
    """`torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        _backward(fabric, model, batch)
        run.keep(norm=torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2))
        _update(optimizer)

    _train(run, step)


@fabric_program(on_three_ranks=True)
def fabric_edits_gradients(run: Run) -> None:
    """Gradients are scaled in place, reduced over the ranks once more, and assigned."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        _backward(fabric, model, batch)
        for number, param in enumerate(model.parameters()):
            if number % 2:
                param.grad.mul_(0.5)
            else:
                param.grad = fabric.all_reduce(param.grad, reduce_op="mean") + 0.01
        _update(optimizer)

    _train(run, step)


@fabric_program()
def fabric_writes_weights(run: Run) -> None:
    """Weights are clamped after each step, and decayed by hand before the next forward."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.95)
        _step(fabric, model, optimizer, batch)
        for param in model.parameters():
            param.data.clamp_(-0.3, 0.3)

    _train(run, step)


@fabric_program()
def fabric_average(run: Run) -> None:
    """An exponential average of the weights, in a copy that is made before `setup`."""
    average = _net()

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        _step(fabric, model, optimizer, batch)
        with torch.no_grad():
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(param, 0.2)

    _train(run, step)
    run.compare(average)


@fabric_program(reference="single")
def fabric_two_optimizers(run: Run) -> None:
    """One module, an optimizer for each of its layers, which step in turns."""
    fabric = run.fabric()
    net = _net()
    run.compare(net)
    made = [torch.optim.SGD(net[at].parameters(), 0.1, momentum=0.9) for at in (0, 2)]  # type: ignore[index]
    model, *optimizers = fabric.setup(net, *made)
    for number, batch in enumerate(run.loader()):
        fabric.backward(_loss(model, batch))
        optimizers[number % 2].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@fabric_program(on_three_ranks=True)
def fabric_gan(run: Run) -> None:
    """A GAN of two modules, each set up with its own optimizer."""
    fabric = run.fabric()
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
    run.compare(nn.ModuleList([generator, critic]))
    make, make_optimizer = fabric.setup(generator, _adamw(generator))
    judge, judge_optimizer = fabric.setup(critic, _adamw(critic))
    for real, noise in run.loader():
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(make(noise).detach())).mean()
        fabric.backward(loss, model=judge)
        _update(judge_optimizer)
        fabric.backward(F.softplus(-judge(make(noise))).mean(), model=make)
        make_optimizer.step()
        make_optimizer.zero_grad()
        judge_optimizer.zero_grad()


#: Fabric itself refuses it for each strategy of DeepSpeed's, before it asks the strategy.
_NAMES_NO_MODEL = {"stage*": Refusal("ValueError", r"backward\(loss, model=model\)")}


@fabric_program(reference="single", refused=_NAMES_NO_MODEL)  # DDP takes no module without gradients
def fabric_distills(run: Run) -> None:
    """A frozen teacher, set up without an optimizer, and a student."""
    _distill(run)


@fabric_program(reference="single")
def fabric_distills_by_name(run: Run) -> None:
    """The same, with `fabric.backward(loss, model=model)`."""
    _distill(run, names=True)


def _distill(run: Run, names: bool = False) -> None:
    fabric = run.fabric()
    teacher, net = _net().requires_grad_(False), nn.Linear(8, 4)
    with torch.no_grad():
        net.weight.fill_(0.1)
        net.bias.zero_()
    run.compare(net)
    wise = fabric.setup_module(teacher)
    model, optimizer = fabric.setup(net, _sgd(net))
    for batch in run.loader():
        with torch.no_grad():
            wanted = wise(batch[0])
        fabric.backward(F.mse_loss(model(batch[0]), wanted), **({"model": model} if names else {}))
        _update(optimizer)


@fabric_program(reference="single")
def fabric_unfreezes(run: Run) -> None:
    """A layer is frozen for two batches."""

    def frozen_at_first(net: nn.Module) -> Any:
        net[0].requires_grad_(False)  # type: ignore[index]
        return _adamw(net)

    count = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        count.append(batch)
        if len(count) == 3:
            model.module[0].requires_grad_(True)
        _step(fabric, model, optimizer, batch)

    _train(run, step, frozen_at_first)


@fabric_program()
def fabric_bare_backward(run: Run) -> None:
    """`loss.backward()`, without Fabric."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        _loss(model, batch).backward()
        _update(optimizer)

    _train(run, step)


@fabric_program(precision="16-true", refused={"stage*": Refusal("RuntimeError", r"call `fabric\.backward\(loss\)`")})
def fabric_bare_backward_in_fp16(run: Run) -> None:
    """`loss.backward()` in 16-true, where Fabric's scales the loss."""
    fabric_bare_backward(run)


@fabric_program()
def fabric_penalty(run: Run) -> None:
    """A gradient penalty by `create_graph=True`."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        fabric.backward(_loss(model, batch) + 0.01 * slope.square().sum())
        _update(optimizer)

    _train(run, step)


@fabric_program()
def fabric_validates(run: Run) -> None:
    """Predictions are gathered between the steps, in `eval()` and without gradients."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        _step(fabric, model, optimizer, batch)
        model.eval()
        with torch.no_grad():
            run.keep(predictions=fabric.all_gather(model(batch[0])))
        model.train()

    _train(run, step)


@fabric_program()
def fabric_reads_weights(run: Run) -> None:
    """`model.state_dict()` and a norm of the weights, after each step."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        _step(fabric, model, optimizer, batch)
        run.keep(norm=sum(param.detach().square().sum() for param in model.parameters()))
        state = model.state_dict()
        run.keep(**{name.replace(".", "_"): value for name, value in state.items()})

    _train(run, step)


@fabric_program()
def fabric_optimizer_states(run: Run) -> None:
    """Moments are halved, and settings are changed, through the optimizer."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        _step(fabric, model, optimizer, batch)
        for param in model.parameters():
            optimizer.state[param]["exp_avg"].mul_(0.5)
        optimizer.param_groups[0]["lr"] *= 0.9

    _train(run, step, _adamw)


@fabric_program()
def fabric_saves(run: Run) -> None:
    """`fabric.save` after two batches, and `fabric.load` into a new module, which goes on."""
    fabric = run.fabric()
    net = _net()
    model, optimizer = fabric.setup(net, _adamw(net))
    batches = list(run.loader())
    for batch in batches[:2]:
        _step(fabric, model, optimizer, batch)
    path = run.folder / "saved"
    fabric.save(path, {"model": model, "optimizer": optimizer, "at": 2})

    fabric = run.fabric()
    net = _net()
    run.compare(net)
    model, optimizer = fabric.setup(net, _adamw(net))
    state = {"model": model, "optimizer": optimizer, "at": 0}
    fabric.load(path, state)
    assert state["at"] == 2
    for batch in batches[2:]:
        _step(fabric, model, optimizer, batch)


class _WithALoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

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
        _update(optimizer)

    _train(run, step, net=_WithALoss())


@fabric_program(reference="single")
def fabric_set_up_again(run: Run) -> None:
    """After two batches with AdamW the module is set up again, with SGD; backwards name the model."""
    fabric = run.fabric()
    net = _net()
    run.compare(net)
    batches = list(run.loader())
    for make, some in ((_adamw, batches[:2]), (_sgd, batches[2:])):
        model, optimizer = fabric.setup(net, make(net))
        for batch in some:
            fabric.backward(_loss(model, batch), model=model)
            _update(optimizer)


class _Complex(nn.Module):
    """A phase per feature, which is a complex number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()
        self.register_buffer("phase", torch.polar(torch.ones(8), torch.arange(8.0)))

    def forward(self, x: Tensor) -> Tensor:
        assert self.phase.is_complex()
        return self.net((x * self.phase).real)


@fabric_program()
def fabric_complex_buffer(run: Run) -> None:
    """A complex buffer, in 32-true: Lightning's plugin for DeepSpeed drops the imaginary part."""
    _train(run, net=_Complex())


@fabric_program()
def fabric_float64_input(run: Run) -> None:
    """Inputs and outputs of float64, which the module itself rounds, in 32-true."""

    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net((x - 1e6).float()).double()

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        out = model(batch[0].double() + 1e6)
        assert out.dtype == torch.float64
        fabric.backward(F.mse_loss(out, batch[1].double()))
        _update(optimizer)

    _train(run, step, net=Rounds())


@fabric_program(precision="bf16-true", reference_precision="bf16-true")
def fabric_default_dtype(run: Run) -> None:
    """New tensors within forward() are of the precision's dtype, in bf16-true."""

    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def forward(self, x: Tensor) -> Tensor:
            assert torch.zeros(1).dtype == torch.bfloat16
            return self.net(torch.cat([x[:, :4], torch.ones(len(x), 4)], 1))

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        out = model(batch[0])
        assert out.dtype == torch.float32
        fabric.backward(F.mse_loss(out, batch[1]))
        _update(optimizer)

    _train(run, step, net=Makes())


def _closure(fabric: Any, model: Any, optimizer: Any, batch: Any) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model, batch)
        fabric.backward(loss)
        return loss

    return closure


@fabric_program()
def fabric_closure(run: Run) -> None:
    """`optimizer.step(closure)`."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        run.keep(loss=fabric.all_reduce(optimizer.step(_closure(fabric, model, optimizer, batch)).detach()))

    _train(run, step)


@fabric_program(refused={"stage[123]*": Refusal("MisconfigurationException", r"LBFGS.*strategy='zeroplus_stage0'")})
def fabric_lbfgs(run: Run) -> None:
    """LBFGS, with a closure."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.step(_closure(fabric, model, optimizer, batch))

    _train(run, step, lambda net: torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3))


@fabric_program()
def fabric_copies(run: Run) -> None:
    """`copy.deepcopy` of the module after two batches: an ordinary module, which a plain loop trains on."""
    copies: list[Any] = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        _step(fabric, model, optimizer, batch)
        copies.append(copy.deepcopy(model.module))

    _train(run, step)
    copied = copies[1]
    optimizer = _sgd(copied)
    for _ in range(2):
        copied(torch.ones(4, 8)).square().mean().backward()
        _update(optimizer)
    run.compare(copied)


@fabric_program()
def fabric_init_module(run: Run) -> None:
    """The module is built under `fabric.init_module()`."""
    fabric = run.fabric()
    with fabric.init_module():
        net = _net()
    run.compare(net)
    model, optimizer = fabric.setup(net, _sgd(net))
    for batch in run.loader():
        _step(fabric, model, optimizer, batch)


@fabric_program()
def fabric_broadcasts_weights(run: Run) -> None:
    """Rank 0's weights are broadcast after a step, by `fabric.broadcast` of a state dict."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        _step(fabric, model, optimizer, batch)
        state = fabric.broadcast({name: value.clone() for name, value in model.module.state_dict().items()})
        model.module.load_state_dict({name: value * 0.9 for name, value in state.items()})

    _train(run, step)


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
        _backward(fabric, model, batch)
        _backward(fabric, model, batch)
        optimizer.step()

    _train(run, step)


@fabric_program()
def fabric_drops_gradients(run: Run) -> None:
    """Gradients of a first backward are dropped by `model.zero_grad()`, and others come."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        fabric.backward(7 * _loss(model, batch))
        model.zero_grad()
        _step(fabric, model, optimizer, batch)

    _train(run, step)


@fabric_program(on_three_ranks=True)
def fabric_encoder_and_decoder(run: Run) -> None:
    """Two modules, set up apart, in one loss: one backward, two steps, each with its own clipping."""
    fabric = run.fabric()
    torch.manual_seed(0)
    encoder, decoder = nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 4)
    run.compare(nn.ModuleList([encoder, decoder]))
    encode, first = fabric.setup(encoder, _adamw(encoder))
    decode, second = fabric.setup(decoder, _sgd(decoder))
    for inputs, targets in run.loader():
        fabric.backward(F.mse_loss(decode(encode(inputs)), targets), model=decode)
        run.keep(norm=fabric.clip_gradients(encode, first, max_norm=0.05))
        fabric.clip_gradients(decode, second, clip_val=0.05)
        _update(first)
        _update(second)


@fabric_program()
def fabric_compiled(run: Run) -> None:
    """`torch.compile` before `setup`."""
    fabric = run.fabric()
    net = _net()
    run.compare(net)
    model, optimizer = fabric.setup(torch.compile(net, backend="eager"), _sgd(net))
    for batch in run.loader():
        _step(fabric, model, optimizer, batch)


@fabric_program(reference="single")  # DDP reduces nothing then
def fabric_inner_module(run: Run) -> None:
    """Forwards by the user's own module, not by what `setup` returns."""
    net = _net()

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        _step(fabric, net, optimizer, batch)

    _train(run, step, net=net)


@fabric_program(reference="ddp_find_unused_parameters_true")
def fabric_freezes(run: Run) -> None:
    """A layer is frozen after two batches; it keeps its weights, and what it had of momentum is not used."""
    count = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        count.append(batch)
        if len(count) == 3:
            model.module[0].requires_grad_(False)
        _step(fabric, model, optimizer, batch)

    _train(run, step)


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
    model, optimizer = fabric.setup(whole, _sgd(whole))
    for at, (inputs, targets) in enumerate(run.loader(8)):
        size = len(inputs) // (dist.get_world_size() if run.alone else 1)
        parts = list(zip(inputs.split(size), targets.split(size), strict=True))
        losses = [F.mse_loss(model(x, "ab"[(at + run.rank + number) % 2]), y) for number, (x, y) in enumerate(parts)]
        fabric.backward(torch.stack(losses).mean())
        _update(optimizer)


@fabric_program()
def fabric_launches(run: Run) -> None:
    """`fabric.launch(function)`, loaders by `fabric.setup_dataloaders`, and a barrier."""

    def main(fabric: Any) -> None:
        net = _net()
        run.compare(net)
        model, optimizer = fabric.setup(net, _sgd(net))
        for batch in fabric.setup_dataloaders(run.loader(), use_distributed_sampler=False):
            _backward(fabric, model, batch)
            _update(optimizer)
        fabric.barrier()

    fabric = run.fabric()
    main(fabric)


@fabric_program()
def fabric_checkpointed_layers(run: Run) -> None:
    """Activations are recomputed in the backward."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        fabric.backward(F.mse_loss(checkpoint(model, batch[0], use_reentrant=False), batch[1]))
        _update(optimizer)

    _train(run, step)


@fabric_program()
def fabric_samples_on_one_rank(run: Run) -> None:
    """Rank 0 alone runs the model without gradients between two batches."""

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        _step(fabric, model, optimizer, batch)
        if fabric.is_global_zero:
            with torch.no_grad():
                model.module(batch[0])
        fabric.barrier()

    _train(run, step)


@fabric_program()
def fabric_skips_steps(run: Run) -> None:
    """Gradients of two batches of four are thrown away, and a step comes without any."""
    count = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        count.append(batch)
        _backward(fabric, model, batch)
        if len(count) % 2:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()

    _train(run, step)
