"""Weights that are written by `data` after their forward: the backward has the written values.

Autograd does not count such a write. A layer that multiplies by `weight.t()`, by a part of a weight, or by the weight
of another layer, keeps a view for its backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.base import Regression
from tests.programs.program import program


class _Writes(Regression):
    """Scales the weights of the last layer between forward and backward."""

    Last: type[nn.Module]

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), self.Last(16, 4))

    @property
    def last(self) -> Any:
        return self.net[2]  # type: ignore[index]

    def scale(self, *unused: Any) -> None:
        for param in self.last.parameters():
            param.data.mul_(0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.scale()
        return loss


class _Transposed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


@program()
class linear_written_before_backward(_Writes):
    """The layer is a linear one."""

    Last = nn.Linear


@program(on_three_ranks=True)
class transposed_written_before_backward(_Writes):
    """The layer multiplies by `weight.t()`."""

    Last = _Transposed


@program()
class transposed_written_in_backward_pre_hook(_Writes):
    """The same layer, whose weights are scaled by a hook before its backward."""

    Last = _Transposed

    def on_fit_start(self) -> None:
        self.last.register_full_backward_pre_hook(self.scale)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


@program()
class used_twice_written_before_backward(_Writes):
    """The layer multiplies by `weight.t()` twice."""

    class Last(_Transposed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + super().forward(0.5 * x)


@program()
class written_between_two_uses(_Writes):
    """The layer multiplies by `weight.t()`, scales its weights, and multiplies by `weight.t()` again."""

    class Last(_Transposed):
        def forward(self, x: Tensor) -> Tensor:
            first = super().forward(x)
            for param in self.parameters():
                param.data.mul_(0.5)
            return first + super().forward(2 * x)


@program()
class parts_written_before_backward(_Writes):
    """The layer multiplies by two halves of its weight, in two ways."""

    class Last(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            first, second = self.weight.chunk(2, 1)
            return F.linear(x[:, :8], first) + torch.einsum("bi,oi->bo", x[:, 8:], second) + self.bias


@program()
class lstm_written_before_backward(_Writes):
    """The layer is an LSTM."""

    class Last(nn.Module):
        def __init__(self, inside: int, outside: int) -> None:
            super().__init__()
            self.lstm = nn.LSTM(inside, outside, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.lstm(x.unflatten(0, (2, -1)))[0]
            return output.flatten(0, 1)


@program()
class read_by_parent_written_before_backward(_Writes):
    """The layer reads the weight of a layer within, and does not call that, as `nn.MultiheadAttention` does."""

    class Last(nn.Module):
        def __init__(self, inside: int, outside: int) -> None:
            super().__init__()
            self.out = nn.Linear(inside, outside)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.out.weight, self.out.bias)


@program()
class written_between_two_forwards(_Writes):
    """Two forwards have views; the weights are scaled after each, and one backward comes at the end."""

    Last = _Transposed

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        again = self.net(0.5 * batch[0]).square().mean()
        self.scale()
        return loss + again


@program()
class written_and_evaluated_before_backward(_Writes):
    """Forwards without gradients come before and after the write, which comes before the backward."""

    Last = _Transposed

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        for name in ("before", "after"):
            with torch.no_grad():
                self.log(name, self.net(batch[0]).mean(), sync_dist=True)
            self.scale()
        return loss


@program()
class written_around_penalty(_Writes):
    """The weights are scaled before and after the gradient that a penalty is made of."""

    Last = _Transposed

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        output = self.net(x)
        self.scale()
        (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        self.scale()
        return output.square().mean() + grad.square().sum()
