"""Tensors that share a weight's memory, kept from before the training: they follow it, and may be written."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from tests.programs.base import Manual, Regression, Swaps, Unfreezes, step
from tests.programs.program import Refusal, program
from tests.programs.run import Run


class _Averages(Regression):
    """A moving average by hand, of tensors that are taken once."""

    def take(self) -> list[Tensor]:
        raise NotImplementedError

    def on_fit_start(self) -> None:
        self.views = self.take()
        self.averages = [view.clone() for view in self.views]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for average, view in zip(self.averages, self.views, strict=True):
            average.lerp_(view, 0.5)

    def on_train_end(self) -> None:
        for average, param in zip(self.averages, self.net.parameters(), strict=True):
            param.data.copy_(average.view_as(param))


@program()
class data_kept(_Averages):
    """`param.data` of every weight is kept in `on_fit_start`, and read in a moving average."""

    def take(self) -> list[Tensor]:
        return [param.data for param in self.net.parameters()]


@program()
class detached_kept(_Averages):
    """The same with `param.detach()`."""

    def take(self) -> list[Tensor]:
        return [param.detach() for param in self.net.parameters()]


@program()
class flat_views_kept(_Averages):
    """The same with `param.detach().view(-1)`."""

    def take(self) -> list[Tensor]:
        return [param.detach().view(-1) for param in self.net.parameters()]


@program()
class state_dict_kept(_Averages):
    """The same with the tensors of `state_dict()`."""

    def take(self) -> list[Tensor]:
        return list(self.net.state_dict().values())


@program()
def clamped_through_views(run: Run) -> None:
    """Weights are clamped after every step through tensors that were kept in `on_fit_start`."""

    class Clamped(Regression):
        def on_fit_start(self) -> None:
            self.views = [param.data for param in self.net.parameters()]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            for view in self.views:
                view.clamp_(-0.2, 0.2)

    run.fit(Clamped(), run.loader(6), max_epochs=2)


@program()
def swapped_detached(run: Run) -> None:
    """Averages are swapped in for validation by `p.data = average`; `p.detach()` of before is swapped back."""

    class Swapped(Swaps):
        def take(self, param: nn.Parameter) -> Tensor:
            return param.detach()

    run.fit(Swapped(), val=run.loader(2), max_epochs=3)


@program()
def compared_with_the_start(run: Run) -> None:
    """A copy of `state_dict()` and the dict itself: the distance that the weights have moved is a penalty."""

    class Anchored(Regression):
        def on_fit_start(self) -> None:
            self.now = self.net.state_dict()
            self.start = {name: value.clone() for name, value in self.now.items()}

        def loss(self, batch: Any) -> Tensor:
            moved = sum((self.now[name] - value).square().sum() for name, value in self.start.items())
            return super().loss(batch) * (1 + torch.as_tensor(moved))

    run.fit(Anchored(), run.loader(6), max_epochs=2)


@program()
class kept_in_configure_optimizers(_Averages):
    """The tensors are kept in `configure_optimizers`."""

    def configure_optimizers(self) -> Any:
        self.early = [param.detach() for param in self.net.parameters()]
        return super().configure_optimizers()

    def take(self) -> list[Tensor]:
        return self.early


@program()
class kept_in_forward(_Averages):
    """A layer's weight is kept by a hook of its forward, once."""

    def take(self) -> list[Tensor]:
        self.layer_views: list[Tensor] = []

        def keep(layer: Any, args: Any) -> None:
            if self.training and len(self.layer_views) < 2:
                self.layer_views.append(layer.weight.detach())

        for index in (0, 2):
            self.net[index].register_forward_pre_hook(keep)  # type: ignore[index]
        return []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.averages:
            self.averages = [view.clone() for view in self.layer_views]
        for average, view in zip(self.averages, self.layer_views, strict=True):
            average.lerp_(view, 0.5)

    def on_train_end(self) -> None:
        for average, layer in zip(self.averages, (self.net[0], self.net[2]), strict=True):  # type: ignore[index]
            layer.weight.data.copy_(average)


@program()
def read_by_one_rank(run: Run) -> None:
    """Rank 0 alone keeps the tensors and reads them; all ranks train."""

    class OneReads(Regression):
        def on_fit_start(self) -> None:
            views = [param.data for param in self.net.parameters()]
            self.views = views if self.global_rank == 0 else []
            self.norms: list[float] = []

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.norms.append(sum(float(view.norm()) for view in self.views))

        def on_train_epoch_end(self) -> None:
            mean = torch.tensor(sum(self.norms) / len(self.norms), device=self.device)
            self.log("norm", mean, sync_dist=True)

    run.fit(OneReads(), run.loader(6), max_epochs=2)


@program()
def taken_by_one_rank_every_batch(run: Run) -> None:
    """After every batch all ranks look at their weights, and rank 0 keeps the tensors until the next one."""

    class Takes(Regression):
        def on_fit_start(self) -> None:
            self.kept: list[Tensor] = []
            self.norms: list[Tensor] = []

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.norms += [tensor.norm() for tensor in self.kept]
            taken = [param.detach() for param in self.net.parameters()]
            self.norms += [tensor.norm() for tensor in taken]
            self.kept = taken if self.global_rank == 0 else []

    module = Takes()
    run.fit(module, run.loader(6), max_epochs=2)
    run.keep(norms=torch.stack(module.norms)[-4:])


class _TakesAndWrites(Regression):
    """After every batch all ranks write their weights, and rank 0 keeps tensors of them until the next batch."""

    def write(self, param: nn.Parameter) -> None:
        raise NotImplementedError

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for param in self.net.parameters():
            self.write(param)
        self.kept = [param.data for param in self.net.parameters() if self.global_rank == 0]


@program()
class kept_by_one_rank_and_written(_TakesAndWrites):
    """Rank 0 keeps tensors of the weights; all ranks write them by `p.data.mul_`, without them."""

    def write(self, param: nn.Parameter) -> None:
        param.data.mul_(0.95)


@program()
class kept_by_one_rank_and_copied(_TakesAndWrites):
    """The same, by `p.copy_` within `torch.no_grad()`."""

    def write(self, param: nn.Parameter) -> None:
        with torch.no_grad():
            param.copy_(param * 0.95)


@program()
class kept_by_one_rank_and_assigned(_TakesAndWrites):
    """The same, by `p.data = tensor`."""

    def write(self, param: nn.Parameter) -> None:
        param.data = param.data * 0.95


@program()
def written_before_the_first_step(run: Run) -> None:
    """Weights are written through tensors that were kept: before forwards, after backwards, and in validation."""

    class Written(Regression):
        def on_fit_start(self) -> None:
            self.views = [param.data for param in self.net.parameters()]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            for view in self.views:
                view.mul_(0.9)

        def on_after_backward(self) -> None:
            for view in self.views:
                view.add_(0.01)

        def on_validation_epoch_end(self) -> None:
            for view in self.views:
                view.clamp_(-0.3, 0.3)

    run.fit(Written(), run.loader(6), val=run.loader(2), max_epochs=2)


@program(precision="bf16-true")
def kept_in_bf16(run: Run) -> None:
    """`bf16-true`: weights are clamped through tensors that were kept."""

    class Clamped(Regression):
        def on_fit_start(self) -> None:
            self.views = [param.detach() for param in self.net.parameters()]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            for view in self.views:
                view.clamp_(-0.2, 0.2)

    run.fit(Clamped(), run.loader(6), max_epochs=2)


@program()
class kept_by_two_optimizers(Manual):
    """Two optimizers: the second network's weights follow those of the first, through tensors that were kept."""

    def build(self) -> nn.Module:
        return nn.ModuleList([super().build(), super().build()])

    def forward(self, x: Tensor) -> Tensor:
        return self.net[0](x) + self.net[1](x)  # type: ignore[index]

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), 0.05) for net in self.net]  # type: ignore[union-attr]

    def on_fit_start(self) -> None:
        first, second = self.net  # type: ignore[misc]
        self.pairs = [(a.detach(), b.data) for a, b in zip(first.parameters(), second.parameters(), strict=True)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.manual_backward(self.loss(batch))
            step(optimizer)
            for leader, follower in self.pairs:
                follower.lerp_(leader, 0.3)


@program()
def kept_and_resumed(run: Run) -> None:
    """A fit whose weights are clamped through kept tensors is resumed, and ends as one that was not interrupted."""

    class Clamped(Regression):
        def on_fit_start(self) -> None:
            self.views = [param.data for param in self.net.parameters()]

        def on_train_start(self) -> None:
            for view in self.views:
                view.mul_(0.9)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            for view in self.views:
                view.clamp_(-0.2, 0.2)

    trainer = run.fit(Clamped(), run.loader(4), max_epochs=1)
    path = run.folder / "kept.ckpt"
    trainer.save_checkpoint(path)
    run.fit(Clamped(), run.loader(4), max_epochs=2, ckpt_path=path)


@program(on_three_ranks=True)
class assigned_and_kept(Manual):
    """A masked copy is assigned to `p.data`, lives on, is read after the step and masked again; then another is."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        weight = self.net[0].weight
        mask = torch.arange(weight.numel(), device=weight.device).view_as(weight) % 3 > 0
        masked = weight.data * mask
        weight.data = masked
        self.log("held", float((masked - weight).abs().sum()))
        super().training_step(batch, batch_idx)
        self.log("after", float(masked.square().sum()))
        masked.mul_(mask)
        self.log("again", self.loss(batch).detach(), sync_dist=True)
        self.kept = [masked, *getattr(self, "kept", [])]
        self.log_dict({f"kept{number}": float(each.abs().sum()) for number, each in enumerate(self.kept)})


@program()
class assigned_and_kept_by_others(Manual):
    """What was assigned to `p.data` is assigned again, after another tensor was; and once to two weights."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first = self.net[0].weight
        if batch_idx == 0:
            self.a, self.b = torch.ones_like(first) / 8, torch.eye(8, device=first.device)
        first.data = self.a if batch_idx % 2 else self.b
        super().training_step(batch, batch_idx)
        self.log_dict({"a": self.a.norm(), "b": self.b.norm()})


@program()
def assigned_and_read_after_the_fit(run: Run) -> None:
    """A tensor that was assigned to `p.data`, a view, and part of a view are read after the fit, by one rank."""

    class Assigns(Regression):
        def on_fit_start(self) -> None:
            self.mine = torch.full_like(self.net[0].bias, 0.1).detach()
            self.net[0].bias.data = self.mine
            self.row = self.net[2].weight.data[1]
            self.whole = self.net[2].bias.detach().view(2, 2)

    module = Assigns()
    run.fit(module)
    if run.rank == 0:
        run.keep(mine=module.mine.cpu() * 1, row=module.row.cpu() * 1, whole=module.whole.cpu() * 1)


@program()
def view_with_grad_kept(run: Run) -> None:
    """A view of a weight, made with grad enabled outside of a forward, is read while the fit runs, and after it."""

    class Keeps(Regression):
        def on_train_start(self) -> None:
            self.flat = self.net[2].weight.view(-1)  # type: ignore[index]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("before", self.flat.detach().norm())
            return loss

        def on_train_batch_end(self, *unused: Any) -> None:
            self.log("norm", self.flat.detach().norm())

    module = Keeps()
    run.fit(module)
    run.keep(norm=module.flat.detach().norm())


@program()
def copied_by_one_rank(run: Run) -> None:
    """Rank 0 alone keeps a deep copy of the `state_dict()` of each validation, and compares it with the last one."""

    class Copies(Regression):
        copied: Any = None

        def on_validation_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                now = copy.deepcopy(self.state_dict())
                if self.copied is not None:
                    self.moved = float(sum((now[name] - self.copied[name]).square().sum() for name in now))
                self.copied = now

        def on_train_end(self) -> None:
            if self.trainer.is_global_zero:
                self.moved += float(self.copied["net.0.weight"].norm())

    module = Copies()
    run.fit(module, val=run.loader(2), val_check_interval=2, max_epochs=2)
    run.keep(moved=module.moved if run.rank == 0 else 0.0)


@program(on_three_ranks=True)
def cloned_by_one_rank(run: Run) -> None:
    """Rank 0 alone keeps `p.detach().clone()` of its best weights, and `.cpu()` of entries of the `state_dict()`."""

    class Clones(Regression):
        moved = 0.0

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.is_global_zero and batch_idx % 2:
                entries = {name: value.cpu().clone() for name, value in self.state_dict().items()}
                self.moved += float(sum(value.double().square().sum() for value in entries.values()))

        def on_validation_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                self.best = [param.detach().clone() for param in self.parameters()]
                self.moved += float(self.best[0].norm())

        def on_train_end(self) -> None:
            if self.trainer.is_global_zero:
                apart = (best - param.detach() for best, param in zip(self.best, self.parameters(), strict=True))
                self.moved += float(sum(each.square().sum() for each in apart))

    module = Clones()
    run.fit(module, val=run.loader(2), val_check_interval=2, max_epochs=2)
    run.keep(moved=module.moved if run.rank == 0 else 0.0)


@program(on_three_ranks=True)
def cloned_by_turns(run: Run) -> None:
    """All ranks clone a weight after a batch, then rank 0 alone does, then all do again."""

    class Clones(Regression):
        moved = 0.0

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if not 5 <= batch_idx < 9 or self.trainer.is_global_zero:
                copied = self.net[0].weight.detach().clone()  # type: ignore[index]
                self.moved += float(copied.norm())

    module = Clones()
    run.fit(module, run.loader(14))
    run.keep(moved=module.moved if run.rank == 0 else 0.0)


class _Clamps(Regression):
    """Weights are clamped through tensors that all ranks keep, or rank 0 reads through tensors that it keeps."""

    by_one_rank = False

    def on_fit_start(self) -> None:
        views = [param.data for param in self.net.parameters()]
        self.views = [] if self.by_one_rank and self.global_rank else views
        self.sums = torch.zeros(8, device=self.device)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for at, view in enumerate(self.views):
            self.sums[at] += view.abs().sum()
            if not self.by_one_rank:
                view.clamp_(-0.25, 0.25)

    def on_train_end(self) -> None:
        if self.trainer.world_size > 1:
            torch.distributed.broadcast(self.sums, 0)


@program(reference="single")
def kept_and_unfrozen(run: Run) -> None:
    """A layer is unfrozen in the middle of a fit whose weights are clamped through kept tensors."""

    class Unfrozen(_Clamps, Unfreezes):
        pass

    module = Unfrozen()
    run.fit(module, run.loader(3), max_epochs=3)
    run.keep(sums=module.sums)


@program(reference="single")
def kept_by_one_rank_and_unfrozen(run: Run) -> None:
    """A layer is unfrozen in the middle of a fit; rank 0 alone keeps tensors of the weights, and reads them."""

    class Unfrozen(_Clamps, Unfreezes):
        by_one_rank = True

    module = Unfrozen()
    run.fit(module, run.loader(3), max_epochs=3)
    run.keep(sums=module.sums)


@program()
def kept_and_a_group_added(run: Run) -> None:
    """`add_param_group` in the middle of a fit whose weights are clamped through kept tensors; AdamW goes on."""

    class Added(_Clamps):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net[2].parameters(), 0.02)  # type: ignore[index]

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                group = {"params": list(self.net[0].parameters()), "lr": 0.01}  # type: ignore[index]
                self.trainer.optimizers[0].add_param_group(group)

    module = Added()
    run.fit(module, run.loader(3), max_epochs=3)
    run.keep(sums=module.sums)


class _KeepsOnce(Regression):
    """Tensors of the weights are kept in the first fit; weights are clamped through them in every fit."""

    views: list[Tensor] | None = None
    fails_at = -1

    def on_fit_start(self) -> None:
        self.views = self.views or [param.data for param in self.net.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.views is not None
        for view in self.views:
            view.clamp_(-0.2, 0.2)
        if batch_idx == self.fails_at:
            raise ZeroDivisionError("the user's own")


@program()
def kept_over_two_fits(run: Run) -> None:
    """Tensors of weights are kept in a fit, copied and pickled after it, and clamped in the next one."""
    module = _KeepsOnce()
    run.fit(module)
    assert module.views is not None
    if run.rank == 0:  # nobody else is needed any more
        run.keep(copied=copy.deepcopy(module.views)[0], pickled=pickle.loads(pickle.dumps(module.views))[2])
    run.fit(module, run.loader(3), max_epochs=2)


@program()
def kept_and_interrupted(run: Run) -> None:
    """The same where an error of the user's ends the first fit."""
    module = _KeepsOnce()
    module.fails_at = 1
    with contextlib.suppress(ZeroDivisionError):
        run.fit(module)
    module.fails_at = -1
    run.fit(module, run.loader(3), max_epochs=2)


@program()
class kept_in_init(_Averages):
    """The tensors are kept in `__init__`."""

    def __init__(self) -> None:
        super().__init__()
        self.early = [param.data for param in self.net.parameters()]

    def take(self) -> list[Tensor]:
        return self.early


@program(refused={"fsdp*": Refusal("RuntimeError", "shares the memory of the weight 'net.0.weight'")})
class differentiable_view_kept_in_init(Regression):
    """A penalty over a flat view of a weight, with its graph, that was made in `__init__`."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = self.net[0].weight.view(-1)  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + 0.01 * self.flat.square().sum()


class _KeepsParts(Regression):
    """Parts of weights are kept in the first fit, and averaged by hand in every fit."""

    parts: list[Tensor] | None = None

    def on_fit_start(self) -> None:
        if self.parts is None:
            first, last = self.net[0], self.net[2]  # type: ignore[index]
            self.parts = [first.weight.data[1], first.weight.detach().view(-1), last.state_dict()["weight"]]
            self.averages = [part.clone() for part in self.parts]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.parts is not None
        for average, part in zip(self.averages, self.parts, strict=True):
            average.lerp_(part, 0.5)


@program()
def parts_kept_over_two_fits(run: Run) -> None:
    """Parts of weights are kept in a fit, and read in the next one, too."""
    module = _KeepsParts()
    run.fit(module)
    run.fit(module, run.loader(3), max_epochs=2)
    run.keep(**{f"average_{at}": average for at, average in enumerate(module.averages)})
