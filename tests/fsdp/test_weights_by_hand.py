"""What a program does to weights between, before and after forwards counts, as under DDP."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

from tests.fsdp.programs import WAYS, Automatic, Manual, difference, message, noise
from tests.fsdp.training import DIM, Net

BOUND = 1e-6


class ProbesBeforeStep(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.differentiate(batch)
        with torch.no_grad():
            self.noted.append(self.loss(batch).item())
        self.noted.append(self.loss(batch).item())
        self.step()


class ProbesInHooks(Automatic):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.noted.append(self.net(torch.ones(4, DIM)).sum().item())


class WritesAfterValidation(Automatic):
    validates = True
    trainer_kwargs = {"val_check_interval": 3}

    def on_validation_epoch_end(self) -> None:
        with torch.no_grad():
            for param in self.parameters():
                param.mul_(0.9)

    def on_validation_end(self) -> None:
        for param in self.parameters():
            param.data.mul_(0.9)


class WritesInValidation(Automatic):
    validates = True
    trainer_kwargs = {"val_check_interval": 3}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for factor in (2.0, 0.5):
            self.noted.append(self.loss(batch).item())
            with torch.no_grad():
                for param in self.parameters():
                    param.mul_(factor)


class Toggles(pl.LightningModule):
    """The GAN of Lightning's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.noted: list[float] = []
        self.make = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
        self.judge = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.make.parameters(), 1e-2), torch.optim.Adam(self.judge.parameters(), 1e-2)], []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            self.shown = self.make(real.flip(0))
            fake = self.make(real.flip(0))
            loss = F.softplus(-self.judge(fake)).mean()
            if index:
                loss = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake.detach())).mean()
            self.noted.append(loss.item())
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


class Loads(Automatic):
    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.load_state_dict({name: noise(value) / 10 for name, value in self.state_dict().items()})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            other = Net()
            with torch.no_grad():
                for param in other.parameters():
                    param.copy_(noise(param) / 5)
            self.net.load_state_dict(other.state_dict())


class Initializes(Automatic):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            torch.manual_seed(5)
            nn.init.eye_(self.net.first.weight)
            nn.init.normal_(self.net.last.weight, std=0.1)
            nn.init.orthogonal_(self.net.blocks[0].up.weight)
            nn.init.constant_(self.net.last.bias, 0.1)
            self.net.blocks[1].up.reset_parameters()


class Clamps(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.differentiate(batch)
        self.step()
        for index, param in enumerate(self.parameters()):
            if index % 3 == 0:
                param.data.clamp_(-0.1, 0.1)
            elif index % 3 == 1:
                param.data = param.data.clamp(-0.1, 0.1)
            else:
                with torch.no_grad():
                    param.clamp_(-0.1, 0.1)


class WritesSlices(Automatic):
    def on_train_batch_end(self, *args: Any) -> None:
        weight = self.net.first.weight
        with torch.no_grad():
            weight[0].zero_()
            weight[:, 1] = 0.0
            weight.view(-1)[5:9].fill_(0.25)
            weight.t()[3].mul_(2)
            weight[weight > 0.3] = 0.3
        weight.data[9, 9] = 1.0
        self.net.last.weight.data.div_(self.net.last.weight.data.norm(dim=1, keepdim=True))


class WritesPlainTensors(Automatic):
    def on_train_batch_end(self, *args: Any) -> None:
        flat = parameters_to_vector(self.net.first.parameters()).detach()
        vector_to_parameters(flat * 0.9, self.net.first.parameters())
        for param in self.net.blocks[0].parameters():
            param.data = noise(param) / 10
        for param in self.net.blocks[1].parameters():
            param.data.add_(noise(param), alpha=0.01)


class ClampedInForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(min=-0.02)
        return super().forward(x)


class NormalizedInForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = F.normalize(self.weight.data)
        return super().forward(x)


class WritesInForward(Automatic):
    def __init__(self) -> None:
        super().__init__()
        self.net.first, self.net.blocks[0].up = ClampedInForward(DIM, DIM), NormalizedInForward(DIM, 2 * DIM)


class Teacher(Automatic):
    """A teacher that is a moving average, moved between forward and backward, and after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def move(self) -> None:
        for param, mean in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
            mean.data.mul_(0.9).add_(param.data, alpha=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch[0])
        loss = self.loss(batch) + F.mse_loss(self.net(1.1 * batch[0]), wanted)
        self.move()
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.move()

    def on_train_batch_end(self, *args: Any) -> None:
        self.move()


class Substitutes(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        for weights in (
            {name: param.detach() * 0.9 for name, param in self.net.named_parameters()},
            {name: noise(param) for name, param in self.net.named_parameters()},
            {"first.weight": torch.zeros(DIM, DIM)},
        ):
            out = torch.func.functional_call(self.net, weights, (batch[0],))
            self.noted.append(out.sum().item())
        self.differentiate(batch)
        self.step()


class Prunes(Automatic):
    def on_train_batch_end(self, out: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (1, 3):
            prune.l1_unstructured(self.net.first, "weight", amount=0.5)
        if batch_idx == 4:
            prune.remove(self.net.first, "weight")


class PrunesByCallback(Automatic):
    trainer_kwargs = {"max_epochs": 2, "max_steps": -1, "limit_train_batches": 3}

    def configure_callbacks(self) -> Any:
        return [ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False)]


class Averages(Automatic):
    trainer_kwargs = {"max_epochs": 4, "max_steps": -1, "limit_train_batches": 3}

    def configure_callbacks(self) -> Any:
        return [StochasticWeightAveraging(1e-2, swa_epoch_start=1)]


class Regularizes(Automatic):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, 4, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before = sum(param.pow(2).sum() for param in self.parameters())
        weight = self.net.blocks[0].up.weight
        angles = F.linear(F.normalize(batch[0]), F.normalize(self.head.weight))  # of which forward() is never called
        loss = self.loss(batch) + F.cross_entropy(angles, batch[1])
        return loss + 0.01 * before + 0.01 * weight.abs().sum() + 0.01 * (weight @ weight.t()).pow(2).sum()


PROGRAMS = [
    ProbesBeforeStep,
    ProbesInHooks,
    WritesAfterValidation,
    WritesInValidation,
    Toggles,
    Loads,
    Initializes,
    Clamps,
    WritesSlices,
    WritesPlainTensors,
    WritesInForward,
    Teacher,
    Substitutes,
    Prunes,
    PrunesByCallback,
    Averages,
    Regularizes,
]


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_touches_weights_trains_as_under_ddp(ranks2: Any, program: type, way: str) -> None:
    for error, noted in ranks2.run(difference, program, way):
        assert error <= BOUND and noted <= BOUND * 10


class Moves(Automatic):
    def on_train_batch_end(self, *args: Any) -> None:
        nn.utils.parametrizations.weight_norm(self.net.first)


class AddsItsOwn(Automatic):
    def on_train_batch_end(self, out: Any, batch: Any, batch_idx: int) -> None:
        sharded = self.net.first.weight.detach().clone()
        sharded += batch[0][:1]


class GathersOnOneRank(Automatic):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        dist.reduce(self.net.first.weight.grad, 0)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (Moves, "taken away or moved during the fit"),
        (AddsItsOwn, "a tensor of this rank alone"),
        (GathersOnOneRank, "`torch.distributed.reduce` would give each rank another tensor"),
    ],
)
def test_what_shards_cannot_do_is_refused(ranks2: Any, program: type, said: str) -> None:
    for text in ranks2.run(message, program):
        assert text.startswith("ValueError") and said in text
