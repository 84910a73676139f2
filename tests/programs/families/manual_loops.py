"""Manual optimization: several backwards, dropped steps, the ways to zero gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.programs.base import Manual, Regression, TwoParts, step
from tests.programs.program import Refusal, program
from tests.programs.refusals import FLOAT64
from tests.programs.run import Run


@program(also=("stage2_compile", "stage3_compile"))
class four_backwards(Manual):
    """Four chunks of a batch, a backward for each, one step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for x, y in zip(batch[0].chunk(4), batch[1].chunk(4), strict=True):
            self.manual_backward(F.mse_loss(self(x), y) / 4)
        optimizer.step()


@program(on_three_ranks=True)
class accumulate_by_hand(Manual):
    """A step after every second batch, with a clip and a schedule."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch) / 2
        self.manual_backward(loss)
        self.log("loss", loss, sync_dist=True)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.05, "norm")
            step(optimizer)
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@program(on_three_ranks=True)
class ppo(Manual):
    """PPO: several passes over minibatches of a rollout, a clipped ratio against the old policy."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"policy": nn.Linear(8, 4), "value": nn.Linear(8, 1)})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, (x, y) = self.optimizers(), batch
        action, reward = y.argmax(1), y.sum(1)
        with torch.no_grad():
            old = self.chosen(x, action)
        for _ in range(3):
            for part in (slice(0, None, 2), slice(1, None, 2)):
                value = self.net["value"](x[part]).squeeze(1)  # type: ignore[index]
                ratio = (self.chosen(x[part], action[part]) - old[part]).exp()
                gain = (reward[part] - value).detach()
                policy_loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                optimizer.zero_grad()
                self.manual_backward(policy_loss + F.mse_loss(value, reward[part]))
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
        self.log("policy_loss", policy_loss, sync_dist=True)

    def chosen(self, x: Tensor, action: Tensor) -> Tensor:
        return self.net["policy"](x).log_softmax(-1).gather(1, action[:, None])  # type: ignore[index]


@program()
class dropped_step(Manual):
    """A batch whose gradients are thrown away, by `zero_grad()` without a step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx != 1:
            optimizer.step()
        optimizer.zero_grad()


@program(on_three_ranks=True)
class no_step_for_some_batches(Manual):
    """`training_step` returns before its backward for a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            self.manual_backward(self.loss(batch))
            step(self.optimizers())


@program()
class zeroed_by_the_module(Manual):
    """`self.zero_grad()` instead of the optimizer's."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


@program()
class zeroed_part_by_part(Manual):
    """`zero_grad()` of each layer of the network, after the step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        for layer in self.net:  # type: ignore[union-attr]
            layer.zero_grad()


@program(reference="ddp_find_unused_parameters_true")
class zero_is_a_gradient(TwoParts):
    """`zero_grad(set_to_none=False)`: a part that is not used any more goes on by momentum and weight decay."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad(set_to_none=False)
        loss = self.use("a", batch)
        self.manual_backward(loss + self.use("b", batch) if batch_idx == 0 else loss)
        self.optimizers().step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=0.1)


@program()
class zeroed_in_place(Manual):
    """`zero_grad(set_to_none=False)`, before the backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad(set_to_none=False)
        self.manual_backward(self.loss(batch))
        optimizer.step()


@program(refused={"stage*": Refusal("RuntimeError", r"Call optimizer\.zero_grad\(\) after each step")})
class never_zeroed(Manual):
    """No `zero_grad()`: gradients add up over the steps."""

    lr = 0.02

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


@program(on_three_ranks=True)
class step_with_closure(Manual):
    """`optimizer.step(closure)`, whose loss is logged."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        self.log("loss", optimizer.step(closure), sync_dist=True)


@program()
class step_without_backward(Manual):
    """A step without any gradient changes nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if batch_idx % 2 == 0:
            self.manual_backward(self.loss(batch))
        optimizer.step()


@program(reference="ddp_find_unused_parameters_true", on_three_ranks=True)
class one_backward_per_part(TwoParts):
    """Two networks, two losses, two backwards, one step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.manual_backward(F.mse_loss(self.net["a"](x), y))  # type: ignore[index]
        self.manual_backward(F.l1_loss(self.net["b"](x), y))  # type: ignore[index]
        step(self.optimizers())


@program()
class shared_trunk_twice(Manual):
    """Two losses of one forward, the first backward with `retain_graph=True`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.manual_backward(F.mse_loss(out, batch[1]), retain_graph=True)
        self.manual_backward(out.abs().mean())
        step(self.optimizers())


@program(reference="single", on_three_ranks=True)
class walked_twice(Manual):
    """`loss.backward(retain_graph=True)` and another backward of the same graph, without `manual_backward`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        F.mse_loss(out, batch[1]).backward(retain_graph=True)
        out.abs().mean().backward()
        step(self.optimizers())


@program()
class adaptive_weight(Manual):
    """VQGAN's adaptive weight: `torch.autograd.grad` of two losses for one activation, then a backward of both."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        hidden = torch.tanh(self.net[0](batch[0]))  # type: ignore[index]
        out = self.net[2](hidden)  # type: ignore[index]
        one, other = F.mse_loss(out, batch[1]), out.abs().mean()
        norms = [torch.autograd.grad(loss, hidden, retain_graph=True)[0].norm() for loss in (one, other)]
        weight = (norms[0] / (norms[1] + 1e-4)).clamp(0, 10).detach()
        self.log("weight", weight, sync_dist=True)
        self.manual_backward(one + weight * other)
        step(self.optimizers())


@program()
class vector_of_losses(Manual):
    """A backward of a vector, with `gradient=`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        losses = (self(batch[0]) - batch[1]).square().mean(1)
        self.manual_backward(losses, gradient=torch.tensor([0.4, 0.3, 0.2, 0.1]))
        step(self.optimizers())


@program(on_three_ranks=True)
class truncated_time(Manual):
    """Truncated backpropagation through time: a step per piece of a sequence, a detached state between them."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"cell": nn.GRUCell(2, 6), "head": nn.Linear(6, 1)})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, state = self.optimizers(), torch.zeros(len(batch[0]), 6)
        for piece in batch[0].chunk(4, 1):
            state = self.net["cell"](piece, state.detach())  # type: ignore[index]
            optimizer.zero_grad()
            loss = F.mse_loss(self.net["head"](state).squeeze(1), piece.sum(1))  # type: ignore[index]
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss, sync_dist=True)


@program()
class different_number_of_backwards(Manual):
    """A batch has one backward more than the one before it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(batch_idx + 1):
            self.manual_backward(self.loss(batch) / (batch_idx + 1))
        step(self.optimizers())


@program()
class no_sync_by_hand(Manual):
    """The strategy's `block_backward_sync()` around all backwards but the last."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        for part in range(2):
            last = part == 1
            with contextlib.nullcontext() if last else strategy.block_backward_sync():
                self.manual_backward(F.mse_loss(self(batch[0][part::2]), batch[1][part::2]))
        step(self.optimizers())


@program(on_three_ranks=True)
class recomputed_activations(Manual):
    """Activations recomputed in the backward, without reentering autograd, in two backwards."""

    def build(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:  # type: ignore[union-attr]
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=False)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            self.manual_backward(F.mse_loss(self(x), y))
        step(self.optimizers())


@program(reference="single")
class backward_by_hand(Manual):
    """`loss.backward()` instead of `manual_backward(loss)`, which DDP does not average."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for half in (0, 1):
            loss = F.mse_loss(self(batch[0])[:, half::2], batch[1][:, half::2])
            loss.backward()
        step(self.optimizers())


@program(reference="single")
class coalesced(Manual):
    """Four backwards in the strategy's `coalesce()`, where there is one."""

    backwards: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        kwargs = {} if self.backwards is None else {"backwards": self.backwards}
        with strategy.coalesce(**kwargs) if hasattr(strategy, "coalesce") else contextlib.nullcontext():
            for column in range(4):
                self.manual_backward(F.mse_loss(self(batch[0])[:, column], batch[1][:, column]))
        step(self.optimizers())


@program(reference="single")
class coalesced_with_number(coalesced):
    """Four backwards in `coalesce(backwards=4)`."""

    backwards = 4


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


@program()
def gradients_by_torch(run: Run) -> None:
    """`torch.autograd.grad` for parameters that were asked for before the forward."""

    class GradientsByTorch(Manual):
        seen: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            params = list(self.net.parameters())
            loss = self.loss(batch)
            grads = torch.autograd.grad(loss, params, retain_graph=True)
            GradientsByTorch.seen.append(sum(grad.square().sum() for grad in grads))  # type: ignore[arg-type]
            self.manual_backward(loss)
            step(self.optimizers())

    GradientsByTorch.seen = []
    run.fit(GradientsByTorch(), run.loader(6))
    run.keep(seen=torch.stack(GradientsByTorch.seen))


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
                    Samples.drawn += self(torch.linspace(-1, 1, 64).view(8, 8)).square().sum().item()

    def run_it(run: Run) -> None:
        Samples.drawn = 0.0
        module = Samples()
        setattr(module, hook, module.draw)
        run.fit(module, run.loader(6), run.loader(4), max_epochs=2)
        drawn = torch.tensor(Samples.drawn)
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


@program(on_three_ranks=True)
class probe_before_the_step(Manual):
    """A forward between backward and step, whose loss is logged."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            self.log("probe", self.loss(batch), sync_dist=True)
        step(self.optimizers())


@program()
class probe_after_the_step(Manual):
    """A forward after the step sees the new weights, and the next batch trains on them."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        step(self.optimizers())
        with torch.no_grad():
            self.log("probe", self.loss(batch), sync_dist=True)


@program(reference="ddp_find_unused_parameters_true")
class toggled_gan(TwoParts):
    """`requires_grad_` is toggled around the forwards and backwards of generator and critic."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"g": nn.Linear(8, 4), "d": nn.Linear(4, 1)})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.net["g"], self.net["d"]  # type: ignore[index]
        g.requires_grad_(False)
        self.manual_backward(F.softplus(d(g(batch[0]))).mean() + F.softplus(-d(batch[1])).mean())
        g.requires_grad_(True)
        d.requires_grad_(False)
        self.manual_backward(F.softplus(-d(g(batch[0]))).mean())
        d.requires_grad_(True)
        step(self.optimizers())


@program(reference="ddp_find_unused_parameters_true")
class toggled_gan_with_shared_fakes(toggled_gan):
    """The generator's fakes are made once; the critic is frozen around its own forward for the generator."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.net["g"], self.net["d"]  # type: ignore[index]
        fake = g(batch[0])
        d.requires_grad_(False)
        self.manual_backward(F.softplus(-d(fake)).mean())
        d.requires_grad_(True)
        g.requires_grad_(False)
        self.manual_backward(F.softplus(d(fake.detach())).mean() + F.softplus(-d(batch[1])).mean())
        g.requires_grad_(True)
        step(self.optimizers())
