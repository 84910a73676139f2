"""LightningModules with several optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.base import Manual, step
from tests.programs.program import program
from tests.programs.run import Run


class _Gan(Manual):
    """A generator and a discriminator, each with an optimizer."""

    def build(self) -> nn.Module:
        layers = {"g": nn.Linear(4, 8), "d": nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))}
        return nn.ModuleDict(layers)

    @property
    def g(self) -> Any:
        return self.net["g"]  # type: ignore[index]

    @property
    def d(self) -> Any:
        return self.net["d"]  # type: ignore[index]

    def of_d(self, batch: Any, fake: Tensor) -> Tensor:
        return F.softplus(-self.d(batch[0])).mean() + F.softplus(self.d(fake)).mean()

    def of_g(self, fake: Tensor) -> Tensor:
        return F.softplus(-self.d(fake)).mean()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 0.01, betas=(0.5, 0.9)) for part in (self.g, self.d)]


@program(reference="single", on_three_ranks=True)
class gan(_Gan):
    """A GAN: two optimizers, toggled, each with its own backward and step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.optimizers()
        self.toggle_optimizer(d)
        self.manual_backward(self.of_d(batch, self.g(batch[1]).detach()))
        step(d)
        self.untoggle_optimizer(d)
        self.toggle_optimizer(g)
        self.manual_backward(self.of_g(self.g(batch[1])))
        step(g)
        self.untoggle_optimizer(g)


@program(reference="single", on_three_ranks=True)
class gan_without_toggles(_Gan):
    """The generator's loss leaves gradients in the discriminator, which are zeroed before its own backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.optimizers()
        fake = self.g(batch[1])
        d.zero_grad()
        self.manual_backward(self.of_d(batch, fake.detach()))
        d.step()
        g.zero_grad()
        self.manual_backward(self.of_g(fake))
        g.step()


@program(reference="single", on_three_ranks=True)
class gradients_of_the_other(_Gan):
    """What the generator's loss gives the discriminator counts in its next step: nobody zeroes it in between."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.optimizers()
        self.manual_backward(0.3 * self.of_g(self.g(batch[1])))
        step(g)
        self.manual_backward(self.of_d(batch, self.g(batch[1]).detach()))
        step(d)


@program(reference="single")
class both_step_after_both_backwards(_Gan):
    """Two backwards, then the steps of both, each clipped by its own norm."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.optimizers()
        fake = self.g(batch[1])
        g.zero_grad()
        d.zero_grad()
        self.manual_backward(self.of_d(batch, fake.detach()))
        for part in self.d.parameters():
            part.requires_grad_(False)
        self.manual_backward(self.of_g(fake))
        for part in self.d.parameters():
            part.requires_grad_(True)
        self.clip_gradients(d, 0.3, "norm")
        self.clip_gradients(g, 0.01, "norm")
        d.step()
        g.step()


class _Wgan(_Gan):
    """Five steps of the critic, one of the generator."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.optimizers()
        fake = self.g(batch[1]).detach()
        mixed = (0.3 * batch[0] + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.d(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        self.toggle_optimizer(d)
        self.manual_backward(self.d(fake).mean() - self.d(batch[0]).mean() + 10 * penalty)
        self.clip_gradients(d, 0.05, "value")
        step(d)
        self.untoggle_optimizer(d)
        if batch_idx % 5 == 4:
            self.toggle_optimizer(g)
            self.manual_backward(-self.d(self.g(batch[1])).mean())
            step(g)
            self.untoggle_optimizer(g)

    def configure_optimizers(self) -> Any:
        # Adam would make steps of the rounding errors that are the gradient of a bias before a difference.
        return [torch.optim.SGD(part.parameters(), 0.05, momentum=0.9) for part in (self.g, self.d)]


@program(reference="single", stays=("net.d.2.bias",), on_three_ranks=True)
def wgan_gp(run: Run) -> None:
    """WGAN-GP: five steps of the critic with a gradient penalty, one of the generator, clipped by value."""
    run.fit(_Wgan(), run.loader(10))


@program(reference="single", trainer={"max_epochs": 2})
class four_networks(Manual):
    """CycleGAN: two generators with one optimizer, two discriminators with one each, and three schedulers."""

    def build(self) -> nn.Module:
        sizes = {"there": (8, 4), "back": (4, 8), "d_a": (8, 1), "d_b": (4, 1)}
        return nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d_a, d_b = self.optimizers()
        a, b = batch
        there, back, of_a, of_b = (self.net[name] for name in ("there", "back", "d_a", "d_b"))  # type: ignore[index]
        fake_b, fake_a = there(a), back(b)
        self.toggle_optimizer(g)
        cycle = F.l1_loss(back(fake_b), a) + F.l1_loss(there(fake_a), b)
        self.manual_backward(F.softplus(-of_a(fake_a)).mean() + F.softplus(-of_b(fake_b)).mean() + cycle)
        step(g)
        self.untoggle_optimizer(g)
        for optimizer, critic, real, fake in ((d_a, of_a, a, fake_a), (d_b, of_b, b, fake_b)):
            self.manual_backward(F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean())
            step(optimizer)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()  # type: ignore[call-arg]
        self.log("lr", self.optimizers()[0].param_groups[0]["lr"])  # type: ignore[index]

    def configure_optimizers(self) -> Any:
        net: Any = self.net
        g = torch.optim.Adam([*net["there"].parameters(), *net["back"].parameters()], 0.01)
        others = [torch.optim.SGD(net[name].parameters(), 0.05, momentum=0.9) for name in ("d_a", "d_b")]
        return [g, *others], [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in (g, *others)]


@program(reference="single", on_three_ranks=True)
class delayed_actor(Manual):
    """TD3: twin critics in each batch, the actor in every second one, a temperature of its own in every third."""

    def build(self) -> nn.Module:
        critics = {"q1": nn.Linear(12, 1), "q2": nn.Linear(12, 1)}
        return nn.ModuleDict({"actor": nn.Linear(8, 4), "temperature": nn.Linear(1, 1, bias=False), **critics})

    def temperature(self) -> Tensor:
        return self.net["temperature"](torch.ones(1, device=self.device)).sum()  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        critics, actor, temperature = self.optimizers()
        net: Any = self.net
        state = batch[0]
        joined = torch.cat([state, batch[1]], 1)
        goal = batch[1].sum(1, keepdim=True)
        self.manual_backward(F.mse_loss(net["q1"](joined), goal) + F.mse_loss(net["q2"](joined), goal))
        step(critics)
        if batch_idx % 2:
            action = net["actor"](state)
            value = net["q1"](torch.cat([state, action], 1)).mean()
            self.manual_backward(self.temperature().detach() * action.square().mean() - value)
            step(actor)
            critics.zero_grad()
        if batch_idx % 3 == 2:
            self.manual_backward(self.temperature() * (net["actor"](state).detach().square().mean() - 1))
            step(temperature)

    def configure_optimizers(self) -> Any:
        net: Any = self.net
        critics = torch.optim.Adam([*net["q1"].parameters(), *net["q2"].parameters()], 0.01)
        return (
            critics,
            torch.optim.Adam(net["actor"].parameters(), 0.01),
            torch.optim.SGD(net["temperature"].parameters(), 0.1),
        )


@program(reference="ddp_find_unused_parameters_true")
class vqgan(Manual):
    """VQGAN: the adversarial loss is weighted by the norms of two gradients of the decoder's last layer."""

    def build(self) -> nn.Module:
        layers = {"encoder": nn.Linear(8, 6), "decoder": nn.Linear(6, 8), "d": nn.Linear(8, 1)}
        return nn.ModuleDict(layers)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        auto, critic = self.optimizers()
        net: Any = self.net
        x = batch[0]
        hidden = net["encoder"](x).tanh()
        image = net["decoder"](hidden)
        nll, adversarial = F.l1_loss(image, x), -net["d"](image).mean()
        last = net["decoder"].weight
        (of_nll,) = torch.autograd.grad(nll, last, retain_graph=True)
        (of_adversarial,) = torch.autograd.grad(adversarial, last, retain_graph=True)
        weight = (of_nll.norm() / (of_adversarial.norm() + 1e-4)).clamp(0, 10).detach()
        self.manual_backward(nll + weight * adversarial)
        step(auto)
        critic.zero_grad()
        self.manual_backward(F.relu(1 - net["d"](x)).mean() + F.relu(1 + net["d"](image.detach())).mean())
        step(critic)

    def configure_optimizers(self) -> Any:
        net: Any = self.net
        auto = torch.optim.Adam([*net["encoder"].parameters(), *net["decoder"].parameters()], 0.01)
        return auto, torch.optim.Adagrad(net["d"].parameters(), 0.05)


class _Two(_Gan):
    """Both parts learn in each batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.optimizers()
        self.manual_backward(F.mse_loss(self.g(batch[1]), batch[0]) + self.d(batch[0]).square().mean())
        step(g)
        step(d)


@program()
class one_backward_for_two(_Two):
    """One backward, two optimizers of different kinds, one with two groups and weight decay."""

    def configure_optimizers(self) -> Any:
        first, *rest = self.d
        groups = [{"params": first.parameters(), "lr": 0.02}, {"params": rest[1].parameters(), "weight_decay": 0.1}]
        return torch.optim.SGD(self.g.parameters(), 0.05, momentum=0.9), torch.optim.AdamW(groups, 0.01)


@program(reference="single", stays=("net.d.*",))
class frozen_optimizer(_Two):
    """All parameters of one optimizer are frozen; its steps do nothing."""

    def on_fit_start(self) -> None:
        self.d.requires_grad_(False)


@program()
class gradients_read_by_optimizer(_Two):
    """`param.grad` of each optimizer's parameters, before and between the steps; one is scaled by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.optimizers()
        self.manual_backward(F.mse_loss(self.g(batch[1]), batch[0]) + self.d(batch[0]).square().mean())
        self.log("g", self.g.weight.grad.norm())
        step(g)
        self.log("d", self.d[0].weight.grad.norm())
        for group in d.param_groups:
            for param in group["params"]:
                param.grad.mul_(0.5)
        step(d)


@program(reference="single")
class windows_of_each(_Gan):
    """Two micro-batches per step of each optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.optimizers()
        for half in zip(*(each.chunk(2) for each in batch), strict=True):
            self.manual_backward(self.of_d(half, self.g(half[1]).detach()) / 2)
        step(d)
        for half in zip(*(each.chunk(2) for each in batch), strict=True):
            self.manual_backward(self.of_g(self.g(half[1])) / 2)
        step(g)
        d.zero_grad()


@program()
class zeros_of_one(_Two):
    """`zero_grad(set_to_none=False)` of one optimizer, whose momentum goes on."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.optimizers()
        self.manual_backward(F.mse_loss(self.g(batch[1]), batch[0]) + self.d(batch[0]).square().mean())
        if batch_idx % 2:
            d.zero_grad(set_to_none=False)
        step(g)
        step(d)


@program(reference="ddp_find_unused_parameters_true")
class zeroed_before_the_other_steps(_Two):
    """`zero_grad()` of one optimizer between a backward and the step of the other, whose gradients it leaves alone."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.optimizers()
        self.manual_backward(F.mse_loss(self.g(batch[1]), batch[0]) + self.d(batch[0]).square().mean())
        d.zero_grad()
        step(g)
        self.manual_backward(self.d(batch[0]).square().mean())
        step(d)


@program()
class groups_added_to_one(_Two):
    """`add_param_group` on the first of two optimizers, in the middle of the fit."""

    def build(self) -> nn.Module:
        self.late = nn.Linear(8, 8)
        return super().build()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.optimizers()
        self.manual_backward(F.mse_loss(self.late(self.g(batch[1])), batch[0]) + self.d(batch[0]).square().mean())
        step(g)
        step(d)
        self.late.zero_grad()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.optimizers()[0].add_param_group({"params": list(self.late.parameters()), "lr": 0.02})  # type: ignore[index]


@program(reference="single", precision="bf16-true", reference_precision="bf16-true")
class gan_in_bf16(gan):
    """The toggled GAN in bf16: at first one of the networks is frozen."""


@program(reference="single", precision="bf16-true", reference_precision="bf16-true")
class gan_without_toggles_in_bf16(gan_without_toggles):
    """The GAN without toggles in bf16."""


@program(reference="single", precision="16-true", without=("fsdp*",))  # there Adam itself is in fp16, and its eps is 0
class gan_in_fp16(gradients_of_the_other):
    """A GAN in fp16, whose optimizers share a loss scale that changes in between."""


@program(reference="single")
def gan_resumes(run: Run) -> None:
    """A GAN is saved, and resumes with the states of both optimizers."""
    path = str(Path(run.folder) / "checkpoint")
    first = run.trainer(max_epochs=1)
    first.fit(gan_without_toggles(), run.loader())
    first.save_checkpoint(path)
    run.fit(gan_without_toggles(), run.loader(), max_epochs=2, ckpt_path=path)
