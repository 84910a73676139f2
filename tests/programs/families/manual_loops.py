"""Manual optimization: several backwards, dropped steps, the ways to zero gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.programs.base import Manual, TwoParts, step
from tests.programs.program import Refusal, program
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


@program()
class zeroed_by_the_loop(Manual):
    """`p.grad.detach_(); p.grad.zero_()` for each parameter, as torch's own `zero_grad()` did, before the backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        for param in self.parameters():
            if param.grad is not None:
                param.grad.detach_()
                param.grad.zero_()
        self.manual_backward(loss)
        self.optimizers().step()


@program()
class gradients_deleted(Manual):
    """`del p.grad`, also of parameters kept since `__init__`: between backwards, before the step, and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = list(self.net[0].parameters())  # type: ignore[index, union-attr]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            del self.net[2].bias.grad, self.kept[0].grad  # type: ignore[index, union-attr, operator]
        self.log("none", float(sum(param.grad is None for param in self.parameters())))
        self.manual_backward(0.5 * self.loss(batch))
        if batch_idx == 2:
            for param in self.net.parameters():
                del param.grad
            self.manual_backward(self.loss(batch))
        self.log("norm", sum(param.grad.norm() for param in self.parameters()), sync_dist=True)  # type: ignore
        self.optimizers().step()
        for param in [*self.kept, *self.net[2].parameters()]:  # type: ignore[index, union-attr]
            del param.grad


@program(also=("stage1_compile", "stage2_compile", "stage3_compile"))
class never_zeroed(Manual):
    """No `zero_grad()`: gradients add up over the steps."""

    lr = 0.02

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


@program(on_three_ranks=True)
class never_zeroed_and_clipped(never_zeroed):
    """The same with clipping: what is added to is the clipped gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        limit, algorithm = [(0.2, "value"), (0.4, "norm")][batch_idx % 2]
        self.clip_gradients(self.optimizers(), limit, algorithm)  # type: ignore[arg-type]
        self.optimizers().step()


@program({"max_epochs": 2})
class zeroed_at_times(never_zeroed):
    """`zero_grad()` after every third step, and steps without a new gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            self.manual_backward(self.loss(batch))
        self.optimizers().step()
        if batch_idx == 2:
            self.optimizers().zero_grad()


@program({"max_epochs": 2})
class read_after_the_step(Manual):
    """`param.grad` read and changed after the step, before it is zeroed or added to."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.clip_gradients(self.optimizers(), 0.3, "norm")  # type: ignore[arg-type]
        self.optimizers().step()
        grads = [param.grad for param in self.parameters()]
        self.log("norm", torch.nn.utils.get_total_norm(grads))
        if batch_idx % 2 == 0:
            self.net[0].weight.grad.mul_(0.5)  # type: ignore[index]
        else:
            self.zero_grad()


@program(refused={"stage[123]*": Refusal("RuntimeError", r"Call optimizer\.zero_grad\(\) after each step")})
class zeroed_at_first(never_zeroed):
    """No `zero_grad()` any more after the third step: where gradients have partitions, zeroed ones are not kept."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if batch_idx < 2:
            self.optimizers().zero_grad()


@program(reference="ddp_find_unused_parameters_true")
class never_zeroed_by_parts(TwoParts):
    """No `zero_grad()`, and one network at a time has a new gradient; one of them is frozen in the end."""

    lr = 0.02

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.net["a"].requires_grad_(False)  # type: ignore[index]
        self.manual_backward(self.use("ab"[batch_idx % 2], batch))
        self.optimizers().step()


@program(reference="single")
class never_zeroed_in_windows(never_zeroed):
    """No `zero_grad()`, two backwards per step in the strategy's `coalesce()`, where there is one."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        with strategy.coalesce() if hasattr(strategy, "coalesce") else contextlib.nullcontext():
            for columns in (slice(0, 2), slice(2, 4)):
                self.manual_backward(F.mse_loss(self(batch[0])[:, columns], batch[1][:, columns]))
        self.optimizers().step()


@program({"max_epochs": 2}, reference="single", on_three_ranks=True)
class never_zeroed_by_one(TwoParts):
    """Two optimizers, of which one is never zeroed, and steps twice at times."""

    lr = 0.02

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.manual_backward(self.use("a", batch) + self.use("b", batch))
        first.step()
        second.step()
        if batch_idx % 2:
            first.step()
        second.zero_grad()
        self.manual_backward(self.use("b", batch))
        second.step()
        second.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[name].parameters(), self.lr, momentum=0.9) for name in "ab"]  # type: ignore[index]


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
        self.manual_backward(losses, gradient=torch.tensor([0.4, 0.3, 0.2, 0.1], device=self.device))
        step(self.optimizers())


@program(on_three_ranks=True)
class truncated_time(Manual):
    """Truncated backpropagation through time: a step per piece of a sequence, a detached state between them."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"cell": nn.GRUCell(2, 6), "head": nn.Linear(6, 1)})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, state = self.optimizers(), torch.zeros(len(batch[0]), 6, device=self.device)
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
class dropped_after_no_sync(Manual):
    """A backward in `block_backward_sync()`, dropped by a submodule's `zero_grad()` and by `p.grad = None`; another."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, strategy = self.optimizers(), self.trainer.strategy
        with strategy.block_backward_sync():  # type: ignore[attr-defined]
            self.manual_backward(self.loss(batch))
        first, *_, last = self.net.children()
        first.zero_grad(set_to_none=batch_idx % 2 == 0)
        for param in last.parameters():
            param.grad = None
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()


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


class _ThreeParts(Manual):
    """Three backwards, of which the last one reduces."""

    reads = False

    def blocked(self) -> Any:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for part in range(3):
            with contextlib.nullcontext() if part == 2 else self.blocked():
                self.manual_backward(self.loss(batch) / 3)
                if self.reads or part == 2:
                    self.log(f"norm{part}", self.net[0].weight.grad.norm(), sync_dist=True)  # type: ignore[index]
        step(self.optimizers())


@program()
class no_sync_of_the_model(_ThreeParts):
    """`self.trainer.model.no_sync()`."""

    def blocked(self) -> Any:
        return self.trainer.model.no_sync()  # type: ignore[union-attr, operator]


@program(without=("fsdp*",))
class switched_by_hand(_ThreeParts):
    """`trainer.model.require_backward_grad_sync = False` until the last backward; the gradient is read after each."""

    reads = True

    @contextlib.contextmanager
    def blocked(self) -> Any:
        model: Any = self.trainer.model
        model.require_backward_grad_sync = False
        yield
        assert not model.require_backward_grad_sync
        model.require_backward_grad_sync = True


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


@program(refused={"fsdp*": Refusal("RuntimeError", r"within block_backward_sync\(\).*this rank's own")})
class ranks_vote(Manual):
    """After `block_backward_sync` each rank reads its own gradients; the signs of most ranks are the gradient."""

    lr = 0.01

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss(batch))
        self.log("norm", self.net[0].weight.grad.norm(), sync_dist=True)
        for param in self.parameters():
            votes = param.grad.sign()
            dist.all_reduce(votes)
            param.grad = votes.sign()
        optimizer.step()
