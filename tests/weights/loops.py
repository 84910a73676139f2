"""What users do to weights in hooks, one loop each."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_zeroplus as zp
from tests.weights.programs import Program, in_gathered


class Plain(Program):
    """Touches nothing."""


class Clamp(Program):
    @in_gathered
    def after(self, index: int) -> None:
        for param in self.student.parameters():
            param.data.clamp_(-0.1, 0.1)


class Rebind(Program):
    @in_gathered
    def after(self, index: int) -> None:
        for param in self.parameters():
            param.data = param.data * 0.5


class LoadBetween(Program):
    @in_gathered
    def after(self, index: int) -> None:
        self.teacher.load_state_dict(self.student.state_dict())


class ByHand(Program):
    @in_gathered
    def after(self, index: int) -> None:
        for target, source in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            target.data.mul_(0.9).add_(source.data, alpha=1 - 0.9)


class Nested(Program):
    def after(self, index: int) -> None:
        with zp.gathered(self.student):
            with zp.gathered(self.student[0]), torch.no_grad():
                self.student[0].weight.mul_(0.9)
            self.student[0].weight.data.add_(0.1)
            self.student(torch.ones(4, 6))
            self.student[0].weight.data.add_(0.1)
            self.seen[f"norm {index}"] = float(self.student[0].weight.norm())


class Penalty(Program):
    def penalty(self) -> Tensor | float:
        with zp.gathered(self.student):
            return 0.1 * sum(param.pow(2).sum() for param in self.student.parameters())


class Raises(Program):
    def after(self, index: int) -> None:
        try:
            with zp.gathered(self.student):
                self.student[0].weight.data.fill_(0.25)
                raise KeyError
        except KeyError:
            pass


class OneWriter(Program):
    def after(self, index: int) -> None:
        with zp.gathered(self.student, writer=1):
            self.student[3].weight.data.mul_(0.5 if self.global_rank == 1 else 7)


class Copies(Program):
    """Copies are ordinary networks, which can be trained."""

    def before(self, index: int) -> None:
        if index != 1:
            return
        with zp.gathered(self.student):
            file = io.BytesIO()
            torch.save(self.student, file)
            file.seek(0)
            copies = [copy.deepcopy(self.student), torch.load(file, weights_only=False)]
        for number, each in enumerate(copies):
            optimizer = torch.optim.SGD(each.parameters(), 0.1)
            each(torch.ones(4, 6)).square().sum().backward()
            optimizer.step()
            self.seen[f"copy {number}"] = [float(param.detach().norm()) for param in each.parameters()]


class LoadState(Program):
    """Without ``gathered``: every rank takes its part of a whole state."""

    def before(self, index: int) -> None:
        if index == 2:
            generator = torch.Generator().manual_seed(5)
            shapes = {name: param.shape for name, param in self.student.named_parameters()}
            state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
            self.student.load_state_dict(state, strict=False)


class Initialize(Program):
    """Without ``gathered``: every rank runs it, and rank 0's values count."""

    def after(self, index: int) -> None:
        if index == 1:
            torch.manual_seed(3)
            self.student[0].reset_parameters()
            self.student[1].reset_parameters()
            nn.init.trunc_normal_(self.student[3].weight)
            nn.init.zeros_(self.student[3].bias)
            nn.init.orthogonal_(self.teacher[0].weight)


class Late(Program):
    """Groups by ``ndim`` of parameters that were partitioned in ``configure_model``."""

    late = True

    def configure_optimizers(self) -> Any:
        params = list(self.student.parameters())
        decayed = [param for param in params if param.ndim >= 2]
        others = [param for param in params if param.ndim < 2]
        self.seen["counts"] = [len(decayed), len(others), sum(param.numel() for param in params)]
        groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, 0.05, eps=1e-3)


class Average(Program):
    def after(self, index: int) -> None:
        self.average()

    def average(self) -> None:
        if type(self.trainer.strategy).__name__ != "DDPStrategy":
            zp.ema_update(self.teacher, self.student, 0.9, buffers="copy")
            return
        for target, source in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            target.data.mul_(0.9).add_(source.data, alpha=1 - 0.9)
        for target, source in zip(self.teacher.buffers(), self.student.buffers(), strict=True):
            target.copy_(source)


class AverageInside(Average):
    """In ``training_step``, where some of the weights are gathered."""

    def after(self, index: int) -> None: ...

    def inside(self, index: int) -> None:
        if index % 2:
            self.teacher[0].weight.shape  # noqa: B018
        self.average()


class Step(Program):
    def after(self, index: int) -> None:
        with zp.gathered(self):
            self.optimizers().step()  # type: ignore[union-attr]


class Differ(Program):
    def after(self, index: int) -> None:
        with zp.gathered(self.student):
            self.student[3].weight.data.mul_(1 + self.global_rank)


class DifferAndGoOn(Program):
    """The ranks write differently, in several ways, and go on with the values from before."""

    def after(self, index: int) -> None:
        kept = self.student[3].weight
        before = kept.detach().clone()
        try:
            with zp.gathered(self.student), torch.no_grad():
                kept.mul_(1 + self.global_rank)
                self.student[3].weight.data.mul_(1 + self.global_rank)
                self.seen["written"] = float(kept.norm() / before.norm())
        except RuntimeError:
            self.seen["reverted"] = torch.equal(before, kept)


class BadShape(Program):
    def after(self, index: int) -> None:
        with zp.gathered(self.student):
            if self.global_rank == 1:
                self.student[3].weight.data = torch.zeros(2)


TOUCHES: dict[str, Callable[[Any, nn.Module], Any]] = {
    "data": lambda weight, net: weight.data,
    "detach": lambda weight, net: weight.detach(),
    "norm": lambda weight, net: float(weight.norm()),
    "arithmetic": lambda weight, net: weight * 2,
    "index": lambda weight, net: weight[0],
    "list": lambda weight, net: torch.cat([weight, weight]),
    "set data": lambda weight, net: setattr(weight, "data", torch.zeros(8, 6)),
    "write": lambda weight, net: weight.requires_grad_(weight.requires_grad).data.mul_(2),
    "deepcopy": lambda weight, net: copy.deepcopy(net),
    "state_dict": lambda weight, net: net.state_dict(),
    "save": lambda weight, net: pickle.loads(pickle.dumps(net)),
    "vector": lambda weight, net: nn.utils.parameters_to_vector(net.parameters()),
    "between": lambda weight, net: net.load_state_dict(copy.copy(net.state_dict())),
}
ASKS: dict[str, Callable[[Any, nn.Module], Any]] = {
    "shape": lambda weight, net: tuple(weight.shape),
    "size": lambda weight, net: (weight.size(1), weight.dim(), weight.ndim, weight.numel(), len(weight)),
    "stride": lambda weight, net: (weight.stride(), weight.is_contiguous()),
    "kind": lambda weight, net: (weight.dtype, weight.device, weight.requires_grad, weight.is_leaf, weight.grad),
    "identity": lambda weight, net: (weight in {weight: 1}, isinstance(weight, nn.Parameter)),
    "like": lambda weight, net: (torch.zeros_like(weight).shape, weight.new_zeros(3).shape),
    "to": lambda weight, net: net.to("cpu") is net,
    "hook": lambda weight, net: weight.register_hook(lambda grad: None).remove(),
}


def _plain(value: Any) -> Any:
    """Values that can be compared, of what a touch returns."""
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if isinstance(value, dict):
        return {name: tensor.tolist() for name, tensor in value.items()}
    return value.tolist() if isinstance(value, Tensor) else value


class Touch(Program):
    """Notes what each touch of a weight gives."""

    def before(self, index: int) -> None:
        if index:
            return
        self.seen["text"] = repr(self.student[0].weight)
        for name, touch in (ASKS | TOUCHES).items():
            try:
                self.seen[name] = _plain(touch(self.student[0].weight, self.student))
            except Exception as error:
                self.seen[name] = f"{type(error).__name__}: {error}"
        if type(self.trainer.strategy).__name__ != "DDPStrategy":
            with pytest.raises(zp.PartitionedWeightError) as refusal:
                self.student.half()
            self.seen["half"] = str(refusal.value)
