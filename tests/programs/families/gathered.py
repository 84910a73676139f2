"""Weights within `zp.gathered()`, reached in every way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import lightning_zeroplus as zp
from tests.programs.base import Manual, Regression, TwoParts, step
from tests.programs.program import program


def _norm(params: Any) -> Tensor:
    return torch.stack([param.detach().norm() for param in params]).sum()


@program(on_three_ranks=True)
class listed_within(Regression):
    """Written by attribute and read from `parameters()`, then the other way round; whose objects are the same."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        layer: Any = self.net[0]
        with zp.gathered(self.net), torch.no_grad():
            layer.weight.add_(0.1)
            self.log("norm", _norm(self.net.parameters()))
            for param in self.net.parameters():
                param.data.mul_(0.9)
            self.log("weight", layer.weight.sum())
            self.log("same", float(next(self.net.parameters()) is layer.weight))


@program(on_three_ranks=True)
class listed_by_one_writer(Regression):
    """One rank goes through `parameters()` within `zp.gathered(..., writer=0)`, and alone reads them afterwards."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with zp.gathered(self.net, writer=0):
            if self.global_rank == 0:
                for param in self.net.parameters():
                    param.data.mul_(0.8)
        with zp.gathered(self.net):
            if self.global_rank == 0:
                self.kept = float(nn.utils.parameters_to_vector(self.net.parameters()).norm())
        self.log("kept", self.kept if self.global_rank == 0 else 0.0)


@program()
class nested_gathered(Regression):
    """`zp.gathered()` of a layer within that of the network: what was written before shows, and stays."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        layer: Any = self.net[0]
        with zp.gathered(self.net), torch.no_grad():
            layer.weight.mul_(0.9)
            with zp.gathered(layer):
                layer.weight.add_(0.05)
                self.log("inner", _norm(layer.parameters()))
            with zp.gathered(list(self.net.parameters())) as whole:
                whole[0].clamp_(max=0.5)
            layer.bias.add_(0.1)
            self.log("outer", _norm(self.net.parameters()))


@program()
class layer_of_a_larger_unit(Manual):
    """A layer's bias is written between forward and backward, while its unit is unsharded."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        layer: Any = self.net[2]
        loss = self.loss(batch)
        with zp.gathered(layer), torch.no_grad():
            layer.bias.add_(0.1)
            state = {name: 0.9 * value for name, value in layer.state_dict().items() if name == "bias"}
            layer.load_state_dict(state, strict=False)
        self.log("bias", layer.bias.detach().sum())
        self.manual_backward(loss)
        step(self.optimizers())


@program()
class kept_within(Regression):
    """Parameters kept since the beginning, and the optimizer's, are read and written within `zp.gathered()`."""

    def on_train_start(self) -> None:
        self.kept = dict(self.net.named_parameters())
        self.row = self.kept["2.weight"].data[0]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        layer: Any = self.net[0]
        with zp.gathered(self.net), torch.no_grad():
            layer.weight.add_(0.1)
            self.log("read", _norm(self.kept.values()))
            self.kept["0.weight"].mul_(0.9)
            self.kept["0.bias"].data.add_(0.1)
            self.log("written", _norm(self.net.parameters()))
            for param in self.trainer.optimizers[0].param_groups[0]["params"]:
                param.clamp_(-0.5, 0.5)
            self.row.mul_(0.9)
            self.net[2].weight.data.add_(0.01)  # type: ignore[index,union-attr]
            self.log("row", self.row.sum())
            self.log("clamped", _norm(self.net.parameters()))
            self.log("found", float(self.net[2].weight in set(self.kept.values())))  # type: ignore[index]


@program(on_three_ranks=True)
class kept_by_one_writer(Regression):
    """One rank writes to kept parameters and to a kept view within `zp.gathered(..., writer=0)`."""

    def on_train_start(self) -> None:
        self.kept = list(self.net.parameters())
        self.row = self.kept[0].data[0]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        layer: Any = self.net[0]
        with zp.gathered(self.net, writer=0), torch.no_grad():
            if self.global_rank == 0:
                layer.weight.mul_(0.9)
                self.row.add_(0.1)
                self.kept[0].clamp_(-0.4, 0.4)
                self.kept[1].data.copy_(self.row.mean() + self.kept[0].norm() + layer.weight.sum())
                layer.bias.mul_(0.5)
        self.log("row", self.row.sum())
        self.log("all", _norm(self.kept))


@program()
class gathered_parameters(Regression):
    """`zp.gathered(parameters)`: the parameters themselves, and what it yields, in turn."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        params = list(self.net.parameters())
        with zp.gathered(params) as whole, torch.no_grad():
            whole[0].mul_(0.9)
            params[0].add_(0.05)
            with zp.gathered(params[0]) as inner:
                inner.clamp_(-0.4, 0.4)
            self.log("norm", _norm(params) + _norm(whole) + self.net[0].weight.norm())  # type: ignore[operator,index]


class _Penalized(TwoParts):
    """A gradient penalty, whose weights stay whole for a second derivative; then a write, and another loss."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        x = batch[0].clone().requires_grad_()
        out = self.net[self.part(batch_idx)](x)  # type: ignore[index]
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        self.manual_backward((out - batch[1]).pow(2).mean() + 0.1 * grad.pow(2).mean())
        self.write()
        loss = self.use("a", batch) + self.use("b", batch)
        self.log("loss", loss, sync_dist=True)
        self.manual_backward(loss)
        optimizer.step()

    def part(self, batch_idx: int) -> str:
        return "ab"[(self.global_rank + batch_idx) % 2]

    def write(self) -> None:
        raise NotImplementedError


@program(reference="ddp_find_unused_parameters_true")
class gathered_after_each_ranks_penalty(_Penalized):
    """`zp.gathered()` after a gradient penalty of another part on each rank: weights are assigned by `data`."""

    def write(self) -> None:
        with zp.gathered(self.net):
            for param in self.net.parameters():
                param.data = param.data * 0.9


@program(reference="ddp_find_unused_parameters_true")
class gathered_after_a_penalty(gathered_after_each_ranks_penalty):
    """The same after a penalty of the same part on all ranks."""

    def part(self, batch_idx: int) -> str:
        return "a"


@program(reference="ddp_find_unused_parameters_true")
class listed_after_each_ranks_penalty(_Penalized):
    """A list of the weights is written in place."""

    def write(self) -> None:
        with zp.gathered(list(self.net.parameters())) as whole, torch.no_grad():
            for param in whole:
                param.mul_(0.9)


@program(reference="ddp_find_unused_parameters_true")
class one_after_each_ranks_penalty(_Penalized):
    """A row of one weight, asked for by attribute."""

    def write(self) -> None:
        layer: Any = self.net["a"]  # type: ignore[index]
        with zp.gathered(layer.weight) as whole, torch.no_grad():
            whole[0].mul_(0.5)


@program()
class forward_within_a_list(Regression):
    """A forward within `zp.gathered(list)` sees what was written there."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with zp.gathered(list(self.net.parameters())) as whole, torch.no_grad():
            for param in whole:
                param.mul_(0.9)
            self.log("within", self.loss(batch), sync_dist=True)


@program()
class gathered_before_the_backward(Manual):
    """Written in place within `zp.gathered()` between forward and backward: torch refuses the backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        with zp.gathered(self.net), torch.no_grad():
            for param in self.net.parameters():
                param.mul_(0.9)
        self.log_refusal(loss, "modified by an inplace operation")
        super().training_step(batch, batch_idx)


@program()
class read_by_a_writer_before_the_backward(Manual):
    """`zp.gathered(..., writer=0)` between forward and backward, in which nobody writes."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        with zp.gathered(self.net, writer=0):
            self.log("norm", _norm(self.net.parameters()))
        self.manual_backward(loss)
        optimizer.step()


@program({"accumulate_grad_batches": 3, "max_epochs": 2})
class row_written_within_a_window(Regression):
    """A row of a weight, one rank's part of it, is written by `data` after each micro-batch of a window."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        layer: Any = self.net[0]
        with zp.gathered(layer.weight) as whole:
            whole.data[0].mul_(0.5)
