"""The optimizer's states, as users read and write them."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

import lightning_zeroplus as zp
from tests.programs.base import Manual, Regression, TwoParts, step
from tests.programs.fabric_base import adamw, fabric_program, loss_of, make_net, train
from tests.programs.program import program
from tests.programs.run import Run


class _Adam(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


@program()
class momentum_forgotten(Regression):
    """`optimizer.state.clear()` before the third batch: the momentum begins anew."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.trainer.optimizers[0].state.clear()


@program()
class momentum_zeroed(Regression):
    """Every momentum buffer is zeroed in place before the third batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            for state in self.trainer.optimizers[0].state.values():
                state["momentum_buffer"].zero_()


@program()
class moments_halved(_Adam):
    """The first moments of AdamW are halved before the third batch, through `optimizer.state[param]`."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            optimizer = self.trainer.optimizers[0]
            for param in self.parameters():
                optimizer.state[param]["exp_avg"].mul_(0.5)


@program(precision="bf16-true", without=("fsdp*",))  # the states of FSDP2 are of bf16, as torch has them
class moments_halved_in_bf16(moments_halved):
    """The first moments of AdamW are halved before the third batch, in bf16-true."""


@program()
class states_replaced(_Adam):
    """`optimizer.state = ...` before the third batch: the first moments of all weights, of all biases nothing."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            optimizer = self.trainer.optimizers[0]
            kept = {param: state for param, state in optimizer.state.items() if param.ndim > 1}
            optimizer.state = defaultdict(dict, kept)


@program()
class moments_logged(_Adam):
    """The second moment of each parameter is logged after each batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        for name, param in self.named_parameters():
            self.log(f"moment of {name}", optimizer.state[param]["exp_avg_sq"].sum())


@program()
class rolled_back(Manual):
    """After the second batch weights and optimizer state go back to what they were after the first."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        step(optimizer)
        if batch_idx == 0:
            self.kept = copy.deepcopy((self.net.state_dict(), optimizer.optimizer.state_dict()))
        if batch_idx == 1:
            self.net.load_state_dict(self.kept[0])
            optimizer.optimizer.load_state_dict(self.kept[1])


@program()
class state_read_by_name(_Adam):
    """`optimizer.state_dict()` is read after each batch: the settings of its group, and the sum of its moments."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = self.trainer.optimizers[0].state_dict()
        self.log("lr", state["param_groups"][0]["lr"])
        self.log("parameters", float(len(state["state"])))
        self.log("moments", sum(each["exp_avg_sq"].sum() for each in state["state"].values()))


@program()
class momentum_set_by_hand(Manual):
    """The momentum of each parameter is set to its gradient before the first step, as a warm start."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx == 0:
            for param in self.parameters():
                optimizer.state[param]["momentum_buffer"] = 0.5 * _whole(param.grad)
        step(optimizer)


def _whole(grad: Any) -> Tensor:
    return grad.detach().clone()


@program()
class groups_of_the_wrapper(Manual):
    """The parameters in `self.optimizers().param_groups` are the module's: their norm is clipped and logged."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        params = optimizer.param_groups[0]["params"]
        self.log("elements", float(sum(param.numel() for param in params)))
        self.log("norm", torch.nn.utils.clip_grad_norm_(params, 0.2))
        step(optimizer)


class _Two(Manual):
    """Two optimizers, of a layer each."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9) for layer in (self.net[0], self.net[2])]  # type: ignore[index]


@program(reference="single")
class states_of_two(_Two):
    """Two optimizers: the momentum of one is halved by hand, the other's is forgotten."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.manual_backward(self.loss(batch))
        if batch_idx == 2:
            for state in first.state.values():
                state["momentum_buffer"].mul_(0.5)
            second.state.clear()
        self.log("states", float(len(first.state) + 10 * len(second.state)))
        for optimizer in (first, second):
            step(optimizer)


class _Keeps(_Adam):
    """The states are taken after the first step, and used after each."""

    moment = "exp_avg"

    def use(self) -> None:
        raise NotImplementedError

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 1:
            self.state = self.trainer.optimizers[0].state
            self.kept = [self.state[param] for param in self.net.parameters()]
            self.moments = [each[self.moment] for each in self.kept]
            self.averages = [moment.clone() for moment in self.moments]
        self.use()


@program()
class moments_kept(_Keeps):
    """Moments are taken once: a moving average of them is the weights' in the end."""

    def use(self) -> None:
        for average, moment in zip(self.averages, self.moments, strict=True):
            average.lerp_(moment, 0.5)

    def on_train_end(self) -> None:
        for average, param in zip(self.averages, self.net.parameters(), strict=True):
            param.data.add_(average)


@program()
class moments_kept_and_halved(_Keeps):
    """Moments are taken once, and halved in place after each step."""

    def use(self) -> None:
        for moment in self.moments:
            moment.mul_(0.5)


@program()
class states_kept(_Keeps):
    """The dicts of states are taken once: their step and their moments are logged after each step."""

    def use(self) -> None:
        self.moments.clear()
        self.log("steps", sum(each["step"] for each in self.kept))
        self.log("moments", sum(each["exp_avg_sq"].sum() for each in self.kept))


@program(on_three_ranks=True)
class moment_kept_by_a_view(_Keeps):
    """Of all states a flat view of one moment is kept, and clamped after each step."""

    def use(self) -> None:
        if self.kept:
            self.view = self.moments[0].view(-1)
            self.kept.clear()
            self.moments.clear()
            self.averages.clear()
        self.view.clamp_(-0.01, 0.01)


@program(precision="bf16-true")
class moments_kept_in_bf16(moments_kept_and_halved):
    """The momenta of SGD are taken once, and halved in place after each step, in bf16-true."""

    moment = "momentum_buffer"
    configure_optimizers = Regression.configure_optimizers


@program(reference="single")
class moments_of_two_kept(_Two):
    """Two optimizers, the second of which steps half as often: the momenta of both are taken once, and halved."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.manual_backward(self.loss(batch))
        step(first)
        if batch_idx % 2 == 0:
            step(second)
        if batch_idx == 0:
            self.kept = [state["momentum_buffer"] for each in (first, second) for state in each.state.values()]
        for momentum in self.kept:
            momentum.mul_(0.5)


#: ZeRO keeps masters and states of 16 bits where it does not offload; FSDP2's weights of 16 bits are as torch has them.
_ZERO_IN_16_BITS = {
    "precision": "bf16-true",
    "reference_precision": "bf16-true",
    "without": ("stage0*", "*offload", "fsdp*"),
}


def _without_masters(run: Run) -> dict[str, Any]:
    """Weights, gradients and states of bf16 alone, as under DDP."""
    config = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    return {"strategy": run.make_strategy(config)}


class _Damped(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01, eps=1e-3)


@program(bound=1e-6, **_ZERO_IN_16_BITS)
def states_of_bf16(run: Run) -> None:
    """`bf16_optimizer_states`: everything in bf16, as DDP in bf16-true; the first moments are read and changed."""

    class Changes(_Damped):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                for param in self.parameters():
                    moment = self.trainer.optimizers[0].state[param]["exp_avg"]
                    self.log("bf16", float(moment.dtype == torch.bfloat16))
                    moment.mul_(0.5)

    run.fit(Changes(), max_epochs=2, **_without_masters(run))


@program(bound=1e-6, **_ZERO_IN_16_BITS)
def states_of_bf16_resumed(run: Run) -> None:
    """`bf16_optimizer_states`, resumed; weights are written in between, and there is a schedule."""

    class Writes(_Damped):
        def on_train_batch_end(self, *args: Any) -> None:
            with zp.gathered(self), torch.no_grad():
                for param in self.parameters():
                    param.mul_(0.9).clamp_(-0.5, 0.5)

        def configure_optimizers(self) -> Any:
            optimizer: Any = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]

    run.fit(Writes(), **_without_masters(run)).save_checkpoint(run.folder / "one.ckpt")
    run.fit(Writes(), max_epochs=3, ckpt_path=run.folder / "one.ckpt", **_without_masters(run))


@program(bound=1e-6, **_ZERO_IN_16_BITS)
def states_of_bf16_in_two(run: Run) -> None:
    """`bf16_optimizer_states` of two optimizers in a manual loop."""

    class Two(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            for optimizer in self.optimizers():
                step(optimizer)

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(self.net[at].parameters(), 0.01, eps=1e-3) for at in (0, 2)]  # type: ignore[index]

    run.fit(Two(), **_without_masters(run))


@program(**_ZERO_IN_16_BITS)
def states_of_bf16_clipped(run: Run) -> None:
    """`bf16_optimizer_states`, clipped by the norm of the gradients of two batches."""
    run.fit(_Damped(), max_epochs=2, gradient_clip_val=0.1, accumulate_grad_batches=2, **_without_masters(run))


def _begun(optimizer: Any, scale: float = 1.0) -> Any:
    """Give an optimizer the states of an earlier training, as from a file."""
    generator = torch.Generator().manual_seed(3)
    saved = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        first = torch.randn(param.shape, generator=generator) * scale
        saved["state"][number] = {"step": torch.tensor(5.0), "exp_avg": first, "exp_avg_sq": first.square() + 0.1}
    optimizer.load_state_dict(saved)
    return optimizer


@program({"max_epochs": 2}, on_three_ranks=True)
class states_from_before(Regression):
    """`configure_optimizers` loads the states of an earlier training, from a file, into its optimizer."""

    def configure_optimizers(self) -> Any:
        return _begun(torch.optim.AdamW(self.parameters(), 0.01))


@program(reference="ddp_find_unused_parameters_true")
class states_from_before_of_two(TwoParts):
    """The same for two optimizers of a manual loop."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for name, optimizer in zip("ab", self.optimizers(), strict=True):
            self.manual_backward(self.use(name, batch))
            step(optimizer)

    def configure_optimizers(self) -> Any:
        return [_begun(torch.optim.AdamW(self.net[name].parameters(), 0.01)) for name in "ab"]  # type: ignore[index]


@program(precision="bf16-true")
class low_states_from_before(Regression):
    """The same in bf16."""

    def configure_optimizers(self) -> Any:
        return _begun(torch.optim.AdamW(self.parameters(), 0.2))


@fabric_program()
def fabric_states_from_before(run: Run) -> None:
    """The optimizer that `fabric.setup` gets has loaded the states of an earlier training."""
    train(run, make=lambda net: _begun(adamw(net)))


@fabric_program()
def fabric_goes_on(run: Run) -> None:
    """A model and its optimizer, which a plain loop has begun to train, go on under Fabric."""
    net = make_net()
    optimizer = torch.optim.Adagrad(net.parameters(), 0.05)
    for batch in run.loader(moved=False):
        batch = [each.mean(0, keepdim=True) * 0 + 0.5 for each in batch]  # the same on all ranks
        loss_of(net, batch).backward()
        step(optimizer)
    train(run, make=lambda _: optimizer, net=net)
