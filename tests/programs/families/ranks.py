"""Ranks that do different things: other branches, other numbers of backwards, a forward of one rank alone."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from tests.programs.base import Manual, Regression, TwoParts, step
from tests.programs.program import program
from tests.programs.refusals import FLOAT64
from tests.programs.run import Run


@program(
    reference="ddp_find_unused_parameters_true",
)
class coalesced_branches(TwoParts):
    """`coalesce(backwards=2)`: the ranks use different networks in the first backward, one of all in the second."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(8, 4) for name in "abc"})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        a, b, c = (self.net[name](batch[0]) for name in "abc")  # type: ignore[index]
        with strategy.coalesce(backwards=2) if hasattr(strategy, "coalesce") else contextlib.nullcontext():
            mine = a if (self.global_rank + batch_idx) % 2 == 0 else b
            self.manual_backward(F.mse_loss(mine + c, batch[1]))
            self.manual_backward(F.l1_loss(self.net["c"](batch[0]), batch[1]))  # type: ignore[index]
        step(self.optimizers())


@program(reference="ddp_find_unused_parameters_true")
def late_branch(run: Run) -> None:
    """From the sixth batch on, each rank's loss uses another network; the fit ends after eight."""

    class LateBranch(TwoParts):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            a, b = (self.net[name](batch[0]) for name in "ab")  # type: ignore[index]
            losses = [F.mse_loss(a, batch[1]), F.l1_loss(b, batch[1])]
            if batch_idx >= 5:
                del losses[(self.global_rank + batch_idx) % 2]
            self.manual_backward(sum(losses[1:], losses[0]))
            step(self.optimizers())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.lr)

    run.fit(LateBranch(), run.loader(8))


@program(
    reference="ddp_find_unused_parameters_true",
    refused={"stage[123]*": FLOAT64},
    on_three_ranks=True,
)
class branches_of_two_dtypes(TwoParts):
    """Each rank uses one of two networks; one is in float64."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(8, 4).double(), "b": nn.Linear(8, 4)})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        net: Any = self.net
        out = net["a"](x.double()).float() if (self.global_rank + batch_idx) % 2 else net["b"](x)
        self.manual_backward(F.mse_loss(out, y))
        step(self.optimizers())


class _Experts(Manual):
    """Four experts and a common head; a subclass says which of them a rank uses."""

    batches = 24

    def build(self) -> nn.Module:
        torch.manual_seed(3)
        layers = {name: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8)) for name in "abcd"}
        return nn.ModuleDict({**layers, "head": nn.Linear(8, 4)})

    def chosen(self, at: int) -> str:
        """The experts that this rank uses for batch ``at``, in order."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for name in self.chosen(batch_idx):
            x = x + self.net[name](x)  # type: ignore[index]
        self.manual_backward(F.mse_loss(self.net["head"](x), y))  # type: ignore[index]
        step(self.optimizers())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


def _on_branches(made: type[_Experts]) -> type[_Experts]:
    """A program of it, for which DDP looks for parameters that a rank does not use."""

    def fit(run: Run) -> None:
        run.fit(made(), run.loader(made.batches))

    fit.__name__, fit.__doc__, fit.__module__ = made.__name__, made.__doc__, made.__module__
    program(
        reference="ddp_find_unused_parameters_true",
        on_three_ranks=True,
    )(fit)
    return made


@_on_branches
class experts_by_turns(_Experts):
    """Mixture of experts: after regular batches, each rank's tokens go to other experts in every batch."""

    def chosen(self, at: int) -> str:
        return "ab" if at < 10 else "abcd"[(at + self.global_rank) % 4] + "d"


@_on_branches
class experts_rarely(_Experts):
    """In every sixth batch one rank drops an expert, as stochastic depth does."""

    def chosen(self, at: int) -> str:
        return "acd" if at % 6 == 5 and self.global_rank == at // 6 % self.trainer.world_size else "abcd"


@_on_branches
class experts_in_another_order(_Experts):
    """From the tenth batch on, each rank applies the same experts in an order of its own."""

    def chosen(self, at: int) -> str:
        return "dcba" if at >= 10 and self.global_rank % 2 else "abcd"


@_on_branches
class one_rank_adds_an_expert(_Experts):
    """In some late batches one rank uses an expert that no rank has used before."""

    def chosen(self, at: int) -> str:
        return "abcd" if at in (9, 10, 17) and self.global_rank == 0 else "ab"


@_on_branches
class experts_that_log(_Experts):
    """Each rank's tokens go to other experts, and the ranks average a metric between forward and backward."""

    def chosen(self, at: int) -> str:
        return "ab" if at < 8 else "abcd"[(at + self.global_rank) % 4] + "d"

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for name in self.chosen(batch_idx):
            x = x + self.net[name](x)  # type: ignore[index]
        loss = F.mse_loss(self.net["head"](x), y)  # type: ignore[index]
        self.log("loss", loss, sync_dist=True)
        self.manual_backward(loss)
        step(self.optimizers())


class _Automatic(_Experts):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.on("train", batch, batch_idx)

    def on(self, stage: str, batch: Any, at: int) -> Tensor:
        x, y = batch
        for name in self.chosen(at):
            x = x + self.net[name](x)  # type: ignore[index]
        loss = F.mse_loss(self.net["head"](x), y)  # type: ignore[index]
        self.log(f"{stage}_loss", loss, sync_dist=True)
        return loss


@_on_branches
class experts_in_automatic_optimization(_Automatic):
    """Rarely, one rank uses other experts; gradients are zeroed between forward and backward, as Lightning does."""

    def on(self, stage: str, batch: Any, at: int) -> Tensor:
        x, y = batch
        for name in self.chosen(at):
            x = x + self.net[name](x)  # type: ignore[index]
        return F.mse_loss(self.net["head"](x), y)  # type: ignore[index]

    def chosen(self, at: int) -> str:
        return "acd" if at % 6 == 5 and self.global_rank == at // 6 % self.trainer.world_size else "abcd"


@_on_branches
class experts_in_validation(_Automatic):
    """Automatic optimization, with experts of each rank's own in training and in validation."""

    batches = 8

    def chosen(self, at: int) -> str:
        return "abcd"[(at + self.global_rank) % 4] + "d"

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.on("val", batch, batch_idx)


class _Parts(nn.Module):
    """A network whose parts a LightningModule calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x) + self.b(x))


class _ByParts(Manual):
    def build(self) -> nn.Module:
        return _Parts()

    def by_parts(self, batch: Any, name: str) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net.head(torch.tanh(getattr(self.net, name)(x))), y)  # type: ignore[operator, union-attr]


@program(reference="ddp_find_unused_parameters_true", on_three_ranks=True)
def parts_by_rank(run: Run) -> None:
    """The parts of a network are called one by one; from the eighth batch on, each rank calls another."""

    class PartsByRank(_ByParts):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            name = "ab"[(batch_idx + self.global_rank) % 2] if batch_idx >= 8 else "a"
            self.manual_backward(self.by_parts(batch, name))
            step(self.optimizers())

    run.fit(PartsByRank(), run.loader(12))


@program()
def parts_with_hooks(run: Run) -> None:
    """The parts of a network are called one by one, and a hook halves the gradient of a weight."""

    class PartsWithHooks(_ByParts):
        def on_fit_start(self) -> None:
            self.net.a.weight.register_hook(lambda grad: 0.5 * grad)  # type: ignore[operator, union-attr]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.by_parts(batch, "a") + self.by_parts(batch, "b"))
            step(self.optimizers())

    run.fit(PartsWithHooks(), run.loader(6))


@program(reference="ddp_find_unused_parameters_true")
def parts_that_are_frozen(run: Run) -> None:
    """The parts of a network are called one by one; one of them is frozen between a backward and its step."""

    class PartsThatAreFrozen(_ByParts):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.by_parts(batch, "a") + self.by_parts(batch, "b"))
            if batch_idx == 2:
                self.net.a.requires_grad_(False)  # type: ignore[operator, union-attr]
            step(self.optimizers())

    run.fit(PartsThatAreFrozen(), run.loader(6))


@program(on_three_ranks=True)
class uneven_chunks(Manual):
    """Each rank cuts its batch into another number of chunks, and synchronizes in the backward of the last."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        chunks = list(zip(*(part.chunk(1 + (batch_idx + self.global_rank) % 3) for part in batch), strict=True))
        for at, chunk in enumerate(chunks):
            waits = at < len(chunks) - 1
            with strategy.block_backward_sync() if waits else contextlib.nullcontext():
                self.manual_backward(self.loss(chunk) / len(chunks))
        step(self.optimizers())


def _samples(name: str, what: str, hook: str) -> None:
    """A program in which rank 0 alone runs the network in a hook, as for samples that it logs."""

    class Samples(Regression):
        drawn = 0.0

        def build(self) -> nn.Module:
            return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)

        def draw(self, *_: Any) -> None:
            if self.global_rank == 0:
                with torch.no_grad():
                    Samples.drawn += (
                        self(torch.linspace(-1, 1, 64, device=self.device).view(8, 8)).square().sum().item()
                    )

    def run_it(run: Run) -> None:
        Samples.drawn = 0.0
        module = Samples()
        setattr(module, hook, module.draw)
        run.fit(module, run.loader(6), run.loader(4), max_epochs=2)
        drawn = torch.tensor(Samples.drawn, device=run.device)
        torch.distributed.broadcast(drawn, 0)
        run.keep(drawn=drawn)

    run_it.__name__, run_it.__doc__, run_it.__module__ = name, what, __name__
    program(on_three_ranks=True)(run_it)


_samples("samples_after_a_batch", "Rank 0 alone runs the network after each batch.", "on_train_batch_end")
_samples("samples_after_a_backward", "Rank 0 alone runs the network between backward and step.", "on_after_backward")
_samples("samples_before_validation", "Rank 0 alone runs the network, which has buffers.", "on_validation_start")
_samples("samples_after_validation", "Rank 0 alone runs the network after validation.", "on_validation_epoch_end")
_samples("samples_after_an_epoch", "Rank 0 alone runs the network after each epoch.", "on_train_epoch_end")
_samples("samples_after_the_fit", "Rank 0 alone runs the network at the end of training.", "on_train_end")


@program(reference="ddp_find_unused_parameters_true", on_three_ranks=True)
class all_change_branches(_Experts):
    """All ranks take the same branch: regularly one of two, then any."""

    def chosen(self, at: int) -> str:
        return ["ab", "cd"][at % 2] if at < 16 else ["ab", "c", "cd", "bd"][at * at % 3]


class _Sampling(Manual):
    """Rank 0 alone runs the network."""

    drawn = 0.0

    def draw(self) -> None:
        if self.global_rank == 0:
            with torch.no_grad():
                type(self).drawn += (
                    self.net(torch.linspace(-1, 1, 64, device=self.device).view(8, 8)).square().sum().item()
                )


def _samples_and(name: str, what: str, training_step: Any) -> None:
    """A program in which rank 0 alone runs the network within a training step."""

    def run_it(run: Run) -> None:
        made = type("Sampling", (_Sampling,), {"training_step": training_step, "drawn": 0.0})
        run.fit(made(), run.loader(6))
        drawn = torch.tensor(made.drawn, device=run.device)
        dist.broadcast(drawn, 0)
        run.keep(drawn=drawn)

    run_it.__name__, run_it.__doc__, run_it.__module__ = name, what, __name__
    program(on_three_ranks=True)(run_it)


def _around(collective: Any) -> Any:
    """A training step: a step, a forward of rank 0 alone, and a collective of the user's own."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        step(self.optimizers())
        self.draw()
        collective(self)

    return training_step


def _barrier(self: Any) -> None:
    dist.barrier()


def _all_reduce(self: Any) -> None:
    number = torch.tensor(float(self.global_rank), device=self.device)
    dist.all_reduce(number)
    assert number.item() == sum(range(dist.get_world_size()))


def _objects(self: Any) -> None:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, self.global_rank)
    assert found == list(range(dist.get_world_size()))


def _metric(self: Any) -> None:
    metric = MeanMetric().to(self.device)
    metric.update(float(self.global_rank))
    assert metric.compute().item() == (dist.get_world_size() - 1) / 2


_samples_and(
    "samples_then_barrier", "Rank 0 alone runs the network; `dist.barrier()`.", _around(lambda _: dist.barrier())
)
_samples_and("samples_then_all_reduce", "Rank 0 alone runs the network; `dist.all_reduce()`.", _around(_all_reduce))
_samples_and("samples_then_objects", "Rank 0 alone runs the network; `dist.all_gather_object()`.", _around(_objects))
_samples_and("samples_then_metric", "Rank 0 alone runs the network; the ranks compute a metric.", _around(_metric))


def _before_the_step(self: Any, batch: Any, batch_idx: int) -> None:
    self.manual_backward(self.loss(batch))
    self.draw()
    step(self.optimizers())


def _between_backwards(self: Any, batch: Any, batch_idx: int) -> None:
    self.manual_backward(self.loss(batch))
    self.draw()
    self.manual_backward(self.loss(batch))
    step(self.optimizers())


_samples_and("samples_before_the_step", "Rank 0 alone runs the network, in manual optimization.", _before_the_step)
_samples_and("samples_between_backwards", "Rank 0 alone runs the network between two backwards.", _between_backwards)


@program()
class read_by_one_before_the_backward(Regression):
    """One rank reads a weight in its step; all write weights after the backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == batch_idx % 2:
            self.kept = float(self.net[0].weight.norm())  # type: ignore[index,union-attr]
        return loss

    def on_after_backward(self) -> None:
        with torch.no_grad():
            for param in self.parameters():
                param.mul_(0.9)


@program({"max_epochs": 2})
class read_by_one_written_by_all(Manual):
    """One rank reads a weight; then all ranks divide each weight by its norm; a forward and a step follow."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.global_rank == batch_idx % 2:
            self.kept = float(self.net[2].weight.norm())  # type: ignore[index,union-attr]
        with torch.no_grad():
            for param in self.parameters():
                param.div_(1 + param.norm())
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        self.manual_backward(loss)
        optimizer.step()


@program()
class read_by_one_after_the_backward(Regression):
    """One rank reads a weight after the backward, as under `is_global_zero`; all divide each weight by its norm."""

    def on_after_backward(self) -> None:
        if self.trainer.is_global_zero:
            self.kept = float(self.net[2].weight.norm())  # type: ignore[index,union-attr]
        with torch.no_grad():
            for param in self.parameters():
                param.div_(1 + param.norm())


class _InLongWindows(Regression):
    """Logs nothing, which would be a collective in each batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


@program()
def touched_in_a_long_window(run: Run) -> None:
    """Within a window of 16 micro-batches one rank reads a weight, all write weights, and one sets a hook."""

    class TouchedInALongWindow(_InLongWindows):
        kept = 0.0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            weight: Any = self.net[2].weight  # type: ignore[index]
            if batch_idx in (10, 27) and self.global_rank == 1:
                self.kept += float(weight.norm())
            if batch_idx in (9, 25, 28):
                weight.data[-1] += 0.5
                self.net[0].weight.data.mul_(0.5)  # type: ignore[index,union-attr,operator]

            def count(param: Any) -> None:
                self.kept += 1.0

            if batch_idx in (23, 34) and self.global_rank == 1:
                weight.register_post_accumulate_grad_hook(count)

    run.fit(TouchedInALongWindow(), run.loader(36), accumulate_grad_batches=16, max_epochs=2)


@program(reference="ddp_find_unused_parameters_true")
def branches_in_a_long_window(run: Run) -> None:
    """Each rank runs another of two networks in windows of 16 micro-batches, first by turns, then always the same."""

    class BranchesInALongWindow(_InLongWindows):
        def build(self) -> nn.Module:
            return nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            name = "ab"[(batch_idx + self.global_rank) % 2 if batch_idx < 25 else self.global_rank]
            return F.mse_loss(self.net[name](batch[0]), batch[1])  # type: ignore[index]

    run.fit(BranchesInALongWindow(), run.loader(36), accumulate_grad_batches=16, max_epochs=2)


@program()
def written_once_by_one_in_a_long_window(run: Run) -> None:
    """Within a window a row, one rank's part of a weight, is written by `data`; then one rank runs a forward more."""

    class WrittenOnce(_InLongWindows):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 20:
                self.net[0].weight.data[0].mul_(0.5)  # type: ignore[index,union-attr]
            if batch_idx == 22 and self.global_rank == 0:
                with torch.no_grad():
                    self.kept = float(self.loss(batch))

    run.fit(WrittenOnce(), run.loader(36), accumulate_grad_batches=16)
