"""``fabric.save``, ``fabric.load`` and ``fabric.load_raw``, in programs that go on after them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.fabric_base import adamw, backward, fabric_program, loss_of, make_net, sgd, train_on, update
from tests.programs.run import Run


def _set_up(run: Run, make: Callable[[nn.Module], Any] = adamw, net: nn.Module | None = None) -> tuple[Any, ...]:
    """Fabric, a network, and both as Fabric returns them; what a new process would have."""
    fabric = run.fabric()
    net = make_net() if net is None else net
    with torch.no_grad():
        for param in net.parameters():  # what is loaded must replace this
            param.mul_(0.5 + len(run.modules))
    run.compare(net)
    return fabric, net, *fabric.setup(net, make(net))


def _saved(run: Run) -> tuple[Any, list[Any], Any, Any, Any]:
    """A model and its optimizer, saved after a batch: where, all batches, and what has trained them."""
    path = run.folder / "saved"
    fabric, _, model, optimizer = _set_up(run)
    batches = list(run.loader())
    train_on(fabric, model, optimizer, batches[0])
    fabric.save(path, {"model": model, "optimizer": optimizer})
    return path, batches, fabric, model, optimizer


def _train_two(fabric: Any, model: Any, first: Any, second: Any, batch: Any) -> None:
    backward(fabric, model, batch)
    update(first)
    update(second)


@fabric_program(on_three_ranks=True)
def fabric_saves_a_gan(run: Run) -> None:
    """A generator and a critic with an optimizer each, in one checkpoint, which is loaded into new ones."""
    path = run.folder / "saved"
    for at in range(2):
        fabric = run.fabric()
        torch.manual_seed(at)
        generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
        run.compare(nn.ModuleList([generator, critic]))
        make, first = fabric.setup(generator, adamw(generator))
        judge, second = fabric.setup(critic, sgd(critic))
        state = {"generator": make, "critic": judge, "first": first, "second": second, "at": at}
        if at:
            fabric.load(path, state)
            assert state["at"] == 0
        for real, noise in list(run.loader())[2 * at : 2 * at + 2]:
            fabric.backward(F.softplus(-judge(real)).mean() + F.softplus(judge(make(noise).detach())).mean())
            update(second)
            fabric.backward(F.softplus(-judge(make(noise))).mean())
            update(first)
            second.zero_grad()
        fabric.save(path, state)


class _Progress:
    def __init__(self) -> None:
        self.best, self.seen = 0.0, [0]

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.seen = state["best"], state["seen"]


@fabric_program()
def fabric_saves_what_users_have(run: Run) -> None:
    """Numbers, lists, tensors, nested data, states of generators, and an object with a `state_dict()`."""
    path = run.folder / "saved"
    fabric, _, model, optimizer = _set_up(run)
    torch.manual_seed(7)
    random.seed(7)
    progress = _Progress()
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "progress": progress,
        "scalar": 2.5,
        "name": "run",
        "none": None,
        "history": [1, (2, 3), {"x": torch.arange(3)}],
        "weights": torch.arange(6.0).view(2, 3),
        "torch_rng": torch.get_rng_state(),
        "python_rng": random.getstate(),
    }
    progress.best, progress.seen = 0.25, [3, 4]
    want = torch.rand(3), random.random()
    train_on(fabric, model, optimizer, next(iter(run.loader())))
    fabric.save(path, state)
    fabric, _, model, optimizer = _set_up(run)
    found = {**dict.fromkeys(state), "model": model, "optimizer": optimizer, "progress": _Progress()}
    assert fabric.load(path, found) == {}
    torch.set_rng_state(found["torch_rng"])
    random.setstate(found["python_rng"])
    assert torch.equal(torch.rand(3), want[0]) and random.random() == want[1]
    assert (found["progress"].best, found["progress"].seen) == (0.25, [3, 4])
    assert (found["scalar"], found["name"], found["none"]) == (2.5, "run", None)
    assert torch.equal(found["weights"], state["weights"]) and found["history"][:2] == [1, (2, 3)]
    train_on(fabric, model, optimizer, next(iter(run.loader())))
    rest = fabric.load(path, {"model": model})
    assert rest["scalar"] == 2.5 and rest["progress"] == {"best": 0.25, "seen": [3, 4]}


@fabric_program(stays=("*",))  # of the first model
def fabric_saves_before_a_step(run: Run) -> None:
    """`fabric.save` before the first step: another model and its optimizer begin there."""
    path = run.folder / "saved"
    fabric, _, model, optimizer = _set_up(run)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    fabric, _, model, optimizer = _set_up(run)
    fabric.load(path, {"model": model, "optimizer": optimizer})
    for batch in run.loader():
        train_on(fabric, model, optimizer, batch)


@fabric_program()
def fabric_goes_back(run: Run) -> None:
    """After two batches the model and its optimizer are loaded as they were before, and train on."""
    path, batches, fabric, model, optimizer = _saved(run)
    for batch in batches[1:3]:
        train_on(fabric, model, optimizer, batch)
    fabric.load(path, {"model": model, "optimizer": optimizer})
    train_on(fabric, model, optimizer, batches[3])


@fabric_program()
def fabric_saves_while_it_accumulates(run: Run) -> None:
    """`fabric.save` between a backward and the step, with and without `fabric.no_backward_sync`."""
    fabric, _, model, optimizer = _set_up(run)
    for at, batch in enumerate(run.loader()):
        with fabric.no_backward_sync(model, enabled=at % 2 == 0):
            backward(fabric, model, batch)
        fabric.save(run.folder / "saved", {"model": model, "optimizer": optimizer})
        if at % 2:
            update(optimizer)


@fabric_program()
def fabric_loads_weights_only(run: Run) -> None:
    """Only the model is loaded; a new optimizer, which has stepped once, goes on."""
    path, batches, fabric, model, optimizer = _saved(run)
    fabric, _, model, optimizer = _set_up(run)
    train_on(fabric, model, optimizer, batches[1])
    fabric.load(path, {"model": model})
    for batch in batches[2:]:
        train_on(fabric, model, optimizer, batch)


@fabric_program()
def fabric_loads_to_evaluate(run: Run) -> None:
    """A model that was set up without an optimizer loads its part of a checkpoint, and is evaluated."""
    path, batches, fabric, model, optimizer = _saved(run)
    fabric = run.fabric()
    judge = fabric.setup_module(make_net())
    judge.eval()
    fabric.load(path, {"model": judge})
    with torch.no_grad():
        run.keep(loss=fabric.all_reduce(loss_of(judge, batches[1])))


@fabric_program()
def fabric_loads_between_its_setups(run: Run) -> None:
    """`fabric.setup_module`, `fabric.load` of the model, `fabric.setup_optimizers`, `fabric.load` of the optimizer."""
    path, batches, fabric, model, optimizer = _saved(run)
    fabric = run.fabric()
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    run.compare(net)
    model = fabric.setup_module(net)
    fabric.load(path, {"model": model})
    optimizer = fabric.setup_optimizers(adamw(net))
    fabric.load(path, {"optimizer": optimizer})
    for batch in batches[1:]:
        train_on(fabric, model, optimizer, batch)


@fabric_program()
def fabric_loads_everything(run: Run) -> None:
    """`fabric.load(path)` returns all state dicts, which a plain model and torch's optimizer load."""
    path = run.folder / "saved"
    fabric, _, model, optimizer = _set_up(run)
    batches = list(run.loader())
    train_on(fabric, model, optimizer, batches[0])
    fabric.save(path, {"model": model, "optimizer": optimizer, "at": 1})
    whole = fabric.load(path)
    assert whole["at"] == 1
    net = make_net()
    net.load_state_dict(whole["model"])
    plain = adamw(net)
    plain.load_state_dict(whole["optimizer"])
    loss_of(net, batches[1]).backward()
    for param in net.parameters():
        param.grad = fabric.all_reduce(param.grad)
    plain.step()
    run.compare(net)


@fabric_program()
def fabric_saves_what_is_inside(run: Run) -> None:
    """The user's own module and optimizer are saved and loaded, in place of what `fabric.setup` has returned."""
    path = run.folder / "saved"
    fabric, net, model, optimizer = _set_up(run)
    batches = list(run.loader())
    own = optimizer.optimizer
    train_on(fabric, model, optimizer, batches[0])
    fabric.save(path, {"model": net, "optimizer": own})
    train_on(fabric, model, optimizer, batches[1])
    fabric.load(path, {"model": net, "optimizer": own})
    train_on(fabric, model, optimizer, batches[2])


@fabric_program()
def fabric_saves_torchs_optimizer(run: Run) -> None:
    """The torch optimizer that was given to `fabric.setup` is saved and loaded."""
    path = run.folder / "saved"
    fabric, net = run.fabric(), make_net()
    run.compare(net)
    own = adamw(net)
    model, optimizer = fabric.setup(net, own)
    batches = list(run.loader())
    train_on(fabric, model, optimizer, batches[0])
    fabric.save(path, {"model": model, "optimizer": own})
    train_on(fabric, model, optimizer, batches[1])
    fabric.load(path, {"model": model, "optimizer": own})
    train_on(fabric, model, optimizer, batches[2])


@fabric_program()
def fabric_filters(run: Run) -> None:
    """`filter=` leaves out biases and a buffer; `strict=False` loads the rest."""
    path = run.folder / "saved"

    def build() -> nn.Module:
        torch.manual_seed(len(run.modules))
        return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.BatchNorm1d(4))

    fabric, net, model, optimizer = _set_up(run, sgd, build())
    batches = list(run.loader())
    train_on(fabric, model, optimizer, batches[0])
    seen = []

    def keep(name: str, value: Tensor) -> bool:
        seen.append((name, tuple(value.shape)))
        return not name.endswith("bias") and name != "2.running_mean"

    fabric.save(path, {"model": model, "at": 3}, filter={"model": keep})
    if run.rank == 0:
        assert sorted(seen) == sorted((name, tuple(value.shape)) for name, value in build().state_dict().items())
    fabric, net, model, optimizer = _set_up(run, sgd, build())
    fabric.load(path, {"model": model}, strict=False)
    train_on(fabric, model, optimizer, batches[1])


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 4)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(self.first(x).tanh())))


@fabric_program(stays=("head.bias",))
def fabric_saves_groups(run: Run) -> None:
    """Two groups in another order than the module's, a tied weight, a frozen bias and buffers are saved and loaded."""
    path = run.folder / "saved"

    def make(net: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": [net.head.weight], "lr": 0.05},
            {"params": [*net.norm.parameters(), *net.second.parameters()]},
        ]
        return torch.optim.Adam([*groups, {"params": [net.first.bias], "betas": (0.5, 0.9)}], 0.01, amsgrad=True)

    batches = list(run.loader())
    for at in range(2):
        torch.manual_seed(at)
        fabric, _, model, optimizer = _set_up(run, make, _Tied())
        if at:
            fabric.load(path, {"model": model, "optimizer": optimizer})
        for batch in batches[2 * at : 2 * at + 2]:
            train_on(fabric, model, optimizer, batch)
        optimizer.param_groups[1]["lr"] = 0.002
        fabric.save(path, {"model": model, "optimizer": optimizer})


@fabric_program()
def fabric_saves_two_optimizers(run: Run) -> None:
    """Two optimizers of one model, of which one steps twice as often, are saved and loaded in another order."""
    path = run.folder / "saved"
    batches = list(run.loader())
    for at in range(2):
        fabric, net = run.fabric(), make_net()
        run.compare(net)
        parts: Any = (net[0], net[2])  # type: ignore[index]
        model, first, second = fabric.setup(net, adamw(parts[0]), sgd(parts[1]))
        state = {"second": second, "model": model, "first": first}
        if at:
            fabric.load(path, {"first": first, "second": second, "model": model})
        for batch in batches[2 * at : 2 * at + 2]:
            backward(fabric, model, batch)
            update(first)
            backward(fabric, model, batch)
            update(first)
            update(second)
        fabric.save(path, state)


@fabric_program()
def fabric_saves_state_dicts(run: Run) -> None:
    """`model.state_dict()` and `optimizer.state_dict()` are saved, and loaded by `load_state_dict`."""
    path = run.folder / "saved"
    fabric, _, model, optimizer = _set_up(run)
    batches = list(run.loader())
    train_on(fabric, model, optimizer, batches[0])
    fabric.save(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    fabric, _, model, optimizer = _set_up(run)
    whole = fabric.load(path)
    model.load_state_dict(whole["model"])
    optimizer.load_state_dict(whole["optimizer"])
    for batch in batches[1:]:
        train_on(fabric, model, optimizer, batch)


@fabric_program()
def fabric_saves_state_dicts_of_two(run: Run) -> None:
    """The same with two optimizers of one model."""
    path = run.folder / "saved"
    batches = list(run.loader())
    for at in range(2):
        fabric, net = run.fabric(), make_net()
        run.compare(net)
        parts: Any = (net[0], net[2])  # type: ignore[index]
        model, *optimizers = fabric.setup(net, adamw(parts[0]), sgd(parts[1]))
        if at:
            whole = fabric.load(path)
            model.load_state_dict(whole["model"])
            for optimizer, state in zip(optimizers, whole["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        for batch in batches[2 * at : 2 * at + 2]:
            backward(fabric, model, batch)
            for optimizer in optimizers:
                update(optimizer)
        optimizer_states = [optimizer.state_dict() for optimizer in optimizers]
        fabric.save(path, {"model": model.state_dict(), "optimizers": optimizer_states})


def _resumes(run: Run) -> None:
    path = run.folder / "saved"
    batches = list(run.loader())
    for at in range(2):
        fabric, _, model, optimizer = _set_up(run)
        if at:
            fabric.load(path, {"model": model, "optimizer": optimizer})
        for batch in batches[2 * at : 2 * at + 2]:
            train_on(fabric, model, optimizer, batch)
        fabric.save(path, {"model": model, "optimizer": optimizer})


@fabric_program(precision="bf16-true")
def fabric_resumes_in_bf16(run: Run) -> None:
    """`fabric.save` and `fabric.load` in bf16-true."""
    _resumes(run)


@fabric_program(precision="16-true")
def fabric_resumes_in_fp16(run: Run) -> None:
    """`fabric.save` and `fabric.load` in 16-true."""
    _resumes(run)


@fabric_program()
def fabric_saves_a_layer(run: Run) -> None:
    """A layer of the model is saved and loaded by itself, and the optimizer goes on with it."""
    path = run.folder / "saved"
    fabric, net, model, optimizer = _set_up(run)
    batches = list(run.loader())
    train_on(fabric, model, optimizer, batches[0])
    fabric.save(path, {"layer": net[2], "at": 1})
    for batch in batches[1:3]:
        train_on(fabric, model, optimizer, batch)
    fabric.load(path, {"layer": net[2]})
    train_on(fabric, model, optimizer, batches[3])


@fabric_program()
def fabric_loads_while_it_accumulates(run: Run) -> None:
    """`fabric.load` between a backward and the step, which uses the gradients from before."""
    path = run.folder / "saved"
    fabric, _, model, optimizer = _set_up(run)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    for at, batch in enumerate(run.loader()):
        with fabric.no_backward_sync(model, enabled=at % 2 == 0):
            backward(fabric, model, batch)
        if at == 2:
            fabric.load(path, {"model": model, "optimizer": optimizer})
        if at % 2:
            update(optimizer)


@fabric_program()
def fabric_filters_the_optimizer(run: Run) -> None:
    """`filter=` of the optimizer, which leaves nothing out; another model goes on from it."""
    path = run.folder / "saved"
    batches = list(run.loader())
    for at in range(2):
        fabric, _, model, optimizer = _set_up(run)
        if at:
            fabric.load(path, {"model": model, "optimizer": optimizer})
        for batch in batches[2 * at : 2 * at + 2]:
            train_on(fabric, model, optimizer, batch)
        fabric.save(path, {"model": model, "optimizer": optimizer}, filter={"optimizer": lambda name, value: True})


@fabric_program()
def fabric_loads_raw_optimizer(run: Run) -> None:
    """`fabric.load_raw` of the state dict of a torch optimizer."""
    path = run.folder / "states.pt"
    net = make_net()
    plain = adamw(net)
    for param in net.parameters():
        param.grad = torch.full_like(param, 0.1)
    plain.step()
    if run.rank == 0:
        torch.save(plain.state_dict(), path)
    fabric, _, model, optimizer = _set_up(run)
    fabric.barrier()
    fabric.load_raw(path, optimizer)
    for batch in run.loader():
        train_on(fabric, model, optimizer, batch)


# DDP reduces nothing for a parameter that was frozen when it was set up. The models are compared after the training.
@fabric_program(reference="single", stays=("*",))
def fabric_saves_an_added_group(run: Run) -> None:
    """The first of two optimizers gets a group last; both are loaded into the same model, and into a new one."""
    path = run.folder / "saved"
    batches = list(run.loader())
    fabric, net = run.fabric(), make_net()
    layers: Any = (net[0], net[2])  # type: ignore[index]
    layers[0].bias.requires_grad_(False)
    model, first, second = fabric.setup(net, torch.optim.AdamW([layers[0].weight], 0.02), adamw(layers[1]))
    _train_two(fabric, model, first, second, batches[0])
    layers[0].bias.requires_grad_(True)
    first.add_param_group({"params": [layers[0].bias], "lr": 0.05})
    _train_two(fabric, model, first, second, batches[1])
    state = {"model": model, "first": first, "second": second}
    fabric.save(path, state)
    _train_two(fabric, model, first, second, batches[2])
    fabric.load(path, state)
    _train_two(fabric, model, first, second, batches[2])
    run.compare(net)
    fabric, net = run.fabric(), make_net()
    layers = (net[0], net[2])  # type: ignore[index]
    groups = [{"params": [layers[0].weight]}, {"params": [layers[0].bias]}]
    model, first, second = fabric.setup(net, torch.optim.AdamW(groups, 0.02), adamw(layers[1]))
    fabric.load(path, {"model": model, "first": first, "second": second})
    _train_two(fabric, model, first, second, batches[3])
    run.compare(net)


@fabric_program(on_three_ranks=True)
def fabric_loads_through_a_hook(run: Run) -> None:
    """`fabric.load`, then `load_raw`, into a model whose hook of `load_state_dict` changes weights."""
    path, batches, *_ = _saved(run)

    def halve(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        state["0.weight"] = state["0.weight"] / 2

    net = make_net()
    net.register_load_state_dict_pre_hook(halve)
    fabric, _, model, optimizer = _set_up(run, net=net)
    fabric.load(path, {"model": model, "optimizer": optimizer})
    train_on(fabric, model, optimizer, batches[1])
    state = model.state_dict()
    whole = {name: value.detach().clone() for name, value in fabric.strategy.get_module_state_dict(model).items()}
    assert whole.keys() == state.keys()
    if fabric.is_global_zero:
        torch.save(whole, run.folder / "raw")
    fabric.barrier()
    fabric.load_raw(run.folder / "raw", model)
    train_on(fabric, model, optimizer, batches[2])
