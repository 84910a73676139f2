"""From the last backward to the step ``param.grad`` is the averaged gradient, to read and to write, as under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.fsdp.programs import WAYS, Automatic, Manual, difference, message, noise
from tests.fsdp.training import DIM

BOUND = 1e-6


class ClipsAfterProbe(Manual):
    """A forward in between leaves the unsharded parameters registered."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.differentiate(batch)
        self.noted.append(self.loss(batch).item())
        self.noted.append(float(clip_grad_norm_(self.parameters(), 0.1)))
        clip_grad_value_(self.parameters(), 0.01)
        self.step()


class ClipsAfterWindow(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        if hasattr(strategy, "coalesce"):
            with strategy.coalesce():
                self.differentiate(batch)
        else:
            self.differentiate(batch)
        self.noted.append(float(clip_grad_norm_(self.parameters(), 0.1)))
        self.step()


class ClipsWhatAccumulated(Automatic):
    trainer_kwargs = {"accumulate_grad_batches": 2}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.noted += [float(value) for value in grad_norm(self, 2).values()]
        self.noted.append(float(clip_grad_norm_(self.parameters(), 0.1)))


class Scales(Automatic):
    def on_after_backward(self) -> None:
        for param in self.parameters():
            param.grad *= 0.5

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            param.grad.add_(noise(param), alpha=0.01)
            if param.ndim > 1:
                param.grad.sub_(param.grad.mean(dim=1, keepdim=True))
                param.grad.data.sub_(param.grad.data.mean(0, keepdim=True))


class Assigns(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.differentiate(batch)
        for param in self.net.last.parameters():
            param.grad = None
        for param in self.net.first.parameters():
            param.grad = noise(param) / 10
        for param in self.net.blocks.parameters():
            param.grad = param.grad * 0.5 + param.detach() * 0.1
        self.step()


class Projects(Manual):
    """PCGrad, on flattened gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        params = list(self.parameters())
        grads = []
        out = self.net(batch[0])
        for loss in (out.pow(2).mean(), F.cross_entropy(out, batch[1])):
            self.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            grads.append(torch.cat([param.grad.flatten() for param in params]).clone())
        dot = grads[0] @ grads[1]
        self.noted.append(dot.item())
        total = grads[0] + grads[1] - dot / grads[0].norm() ** 2 * grads[0]
        for param, part in zip(params, total.split([param.numel() for param in params]), strict=True):
            param.grad = part.view_as(param).clone()
        self.step()


class Sharpens(Manual):
    """SAM, by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.differentiate(batch)
        norm = torch.stack([param.grad.norm() for param in self.parameters()]).norm()
        moves = [param.grad * (0.05 / norm) for param in self.parameters()]
        with torch.no_grad():
            for param, move in zip(self.parameters(), moves, strict=True):
                param.add_(move)
        self.optimizers().zero_grad()
        self.differentiate(batch)
        with torch.no_grad():
            for param, move in zip(self.parameters(), moves, strict=True):
                param.sub_(move)
        self.step()


def _halve(param: Tensor) -> None:
    param.grad.mul_(0.5)


class Hooks(Automatic):
    """A tensor hook sees this rank's gradient of the whole parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net.first.weight.register_hook(lambda grad: grad * 0.5)
        self.handle = self.net.blocks[0].up.weight.register_hook(lambda grad: grad.clamp(-0.001, 0.001))
        self.net.last.weight.register_post_accumulate_grad_hook(_halve)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.net.last.bias.register_hook(lambda grad: grad * 2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.handle.remove()


class _Adam(Automatic):
    def __init__(self) -> None:
        super().__init__(optimizer="adamw")


class Tags(_Adam):
    """An attribute of a parameter chooses its weight decay."""

    def __init__(self) -> None:
        super().__init__()
        for param in self.net.blocks.parameters():
            param.no_decay = True

    def configure_optimizers(self) -> Any:
        tagged = [param for param in self.parameters() if getattr(param, "no_decay", False)]
        others = [param for param in self.parameters() if not getattr(param, "no_decay", False)]
        assert len(tagged) == 8
        groups = [{"params": tagged, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.5}]
        return torch.optim.AdamW(groups, 1e-2)


class Freezes(_Adam):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.first.requires_grad_(batch_idx < 3)


class Unfreezes(_Adam):
    reference = "single"  # DDP never averages what was frozen at its beginning

    def __init__(self) -> None:
        super().__init__()
        self.net.first.requires_grad_(False)
        self.front = nn.Linear(DIM, DIM).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(self.front(batch[0])), batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.net.first.requires_grad_(True)
            self.front.requires_grad_(True)


class Finetunes(Automatic):
    reference = "single"
    trainer_kwargs = {"max_epochs": 4, "max_steps": -1, "limit_train_batches": 2}

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(DIM, DIM)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(self.backbone(batch[0])), batch[1])

    def configure_callbacks(self) -> Any:
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=2, verbose=False)]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([param for param in self.parameters() if param.requires_grad], 0.1)


class FreezesBetween(Manual):
    """A gradient that is there counts, whatever ``requires_grad`` says at the step."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.judge = nn.Linear(4, 1)
        self.idle = nn.Linear(DIM, 4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.manual_backward(self.idle(batch[0]).pow(2).mean())
        out = self.net(batch[0])
        self.manual_backward(self.judge(out.detach()).pow(2).mean())
        self.judge.requires_grad_(False)
        self.manual_backward(self.judge(self.net(batch[0])).mean() + F.cross_entropy(out, batch[1]))
        self.step()
        self.judge.requires_grad_(True)


class Orthogonalizes(Automatic):
    """Optimizers that need whole matrices have them."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([param for param in self.parameters() if param.ndim == 2], lr=0.02)


class Factorizes(Automatic):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.02)


PROGRAMS = [
    ClipsAfterProbe,
    ClipsAfterWindow,
    ClipsWhatAccumulated,
    Scales,
    Assigns,
    Projects,
    Sharpens,
    Hooks,
    Tags,
    Freezes,
    Unfreezes,
    Finetunes,
    FreezesBetween,
    Orthogonalizes,
    Factorizes,
]


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_touches_gradients_trains_as_under_ddp(ranks2: Any, program: type, way: str) -> None:
    for error, noted in ranks2.run(difference, program, way):
        assert error <= BOUND and noted <= BOUND * 10


class ReadsInWindow(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        with self.trainer.strategy.coalesce():
            self.differentiate(batch)
            clip_grad_norm_(self.parameters(), 0.1)


def test_a_gradient_that_is_not_reduced_is_not_shown(ranks2: Any) -> None:
    for text in ranks2.run(message, ReadsInWindow):
        assert text.startswith("RuntimeError") and "is not reduced yet inside a coalesce() window" in text
