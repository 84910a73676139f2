"""Gradients that are kept as tensors: under DDP later backwards add to them, as long as they are zeroed in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.base import Manual, Regression, TwoParts, Unfreezes
from tests.programs.fabric_base import backward, fabric_program, loss_of, train
from tests.programs.program import COMPILE, Refusal, program
from tests.programs.run import Run


def norm(grads: list[Tensor]) -> Tensor:
    """The squared norm."""
    return torch.stack([grad.square().sum() for grad in grads]).sum()


class _Kept(Regression):
    """Gradients are kept after the first backward; a step begins with zeroing in place."""

    def on_fit_start(self) -> None:
        self.kept: list[Tensor] = []

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def on_after_backward(self) -> None:
        if not self.kept:
            self.kept = self.take()
        self.use()

    def take(self) -> list[Tensor]:
        return [param.grad for param in self.net.parameters()]  # type: ignore[misc]

    def use(self) -> None:
        self.log("norm", norm(self.kept))


class _Scaled(_Kept):
    def use(self) -> None:
        super().use()
        for grad in self.kept:
            grad.mul_(0.5)


@program(on_three_ranks=True)
class grads_kept_read(_Kept):
    """Gradients are kept once, zeroed by `zero_grad(set_to_none=False)`, and read after each backward."""


@program(on_three_ranks=True, also=COMPILE)
class grads_kept_written(_Scaled):
    """The same, and they are scaled after each backward."""


@program()
class grads_kept_zeroed_by_module(_Scaled):
    """The same, zeroed by `module.zero_grad(set_to_none=False)`."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zero_grad(set_to_none=False)


@program()
class grads_kept_zeroed_by_hand(_Scaled):
    """The same, zeroed by `torch._foreach_zero_` of the kept tensors."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.kept:
            torch._foreach_zero_(self.kept)


@program()
class grads_kept_fades(_Scaled):
    """The same, but no step zeroes: kept gradients are halved in its place, so that earlier ones count."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.kept:
            torch._foreach_mul_(self.kept, 0.5)


@program()
class grads_kept_views(_Scaled):
    """Views of gradients are kept: rows, `detach()`, `data` and `view(-1)`."""

    def take(self) -> list[Tensor]:
        first, bias, second, last = super().take()
        return [first[0], bias.detach(), second.data, last.view(-1)]


@program()
class grads_kept_and_read_again(_Scaled):
    """Kept gradients are the tensors that `param.grad` is."""

    def use(self) -> None:
        super().use()
        same = [param.grad is kept for param, kept in zip(self.net.parameters(), self.kept, strict=True)]
        self.log("same", float(all(same)))


@program(trainer={"gradient_clip_val": 0.05})
class grads_kept_clipped(_Scaled):
    """The Trainer clips by norm, and the kept gradients show it, before they are zeroed."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.kept:
            self.log("clipped", norm(self.kept))


@program(trainer={"accumulate_grad_batches": 2})
class grads_kept_over_accumulated(_Kept):
    """Two batches per step; kept gradients are read, and scaled, before the step."""

    def on_after_backward(self) -> None:
        pass

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not self.kept:
            self.kept = self.take()
        self.log("norm", norm(self.kept))
        torch._foreach_mul_(self.kept, 0.5)


@program()
class grads_kept_until_none(_Kept):
    """Steps begin with `zero_grad()`: what is kept stays the gradient of the step before, and is compared with."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()

    def on_after_backward(self) -> None:
        now = self.take()
        if self.kept:
            self.log("angle", torch.stack([(a * b).sum() for a, b in zip(now, self.kept, strict=True)]).sum())
        self.kept = now


@program()
class grads_kept_until_none_by_hand(_Kept):
    """The same, and `p.grad = None` after each step is by hand, in a loop."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        for param in self.net.parameters():
            param.grad = None

    on_after_backward = grads_kept_until_none.on_after_backward


@program()
def grads_kept_later(run: Run) -> None:
    """Two batches with `zero_grad()`; then gradients are kept, and halved in its place."""

    class Later(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            if batch_idx == 2:
                self.kept = [param.grad for param in self.net.parameters()]
            optimizer.step()
            if batch_idx < 2:
                optimizer.zero_grad()
            else:
                torch._foreach_mul_(self.kept, 0.5)

    run.fit(Later(), run.loader(6))


@program()
class grads_kept_on_one_rank(_Kept):
    """All ranks read the gradients, and rank 0 alone keeps them."""

    def on_after_backward(self) -> None:
        now = self.take()
        if dist.is_initialized() and dist.get_rank() == 0:
            self.kept = self.kept or now
        self.log("norm", norm(self.kept or now))


@program(precision="bf16-true", without=("fsdp*",))  # whose weights have no fp32 masters
class grads_kept_in_bf16(_Scaled):
    """Gradients are kept in bf16-true."""


@program(precision="16-true")
class grads_kept_in_fp16(_Scaled):
    """Gradients are kept in 16-true, where the loss has a scale."""


class _Flat(Manual):
    """Gradients are views of one flat tensor, which is zeroed as a whole."""

    def on_fit_start(self) -> None:
        params = list(self.net.parameters())
        self.flat = torch.zeros(sum(param.numel() for param in params), device=params[0].device)
        self.views = self.flat.split([param.numel() for param in params])

    def give(self) -> None:
        for param, view in zip(self.net.parameters(), self.views, strict=True):
            param.grad = view.view_as(param)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.flat.zero_()
        if batch_idx == 0:
            self.give()
        self.manual_backward(self.loss(batch))
        self.log("norm", self.flat.norm())
        self.flat.mul_(torch.clamp(0.1 / self.flat.norm(), max=1.0))
        self.optimizers().step()


_COPIED = {"fsdp*": Refusal("RuntimeError", r"still exists at the next backward.*Assign a copy")}


@program(refused=_COPIED)
class grads_in_one_tensor(_Flat):
    """`param.grad = flat[a:b].view_as(param)` once; `flat` is zeroed, clipped and read."""


@program(refused=_COPIED)
class grads_in_one_tensor_each_step(_Flat):
    """The same, assigned in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.flat.zero_()
        self.give()
        self.manual_backward(self.loss(batch))
        self.log("norm", self.flat.norm())
        self.flat.mul_(0.5)
        self.optimizers().step()


@program()
class grads_kept_between_backwards(Manual):
    """Gradients are kept after the first backward of a step, and used after the second."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        kept = [param.grad for param in self.net.parameters()]
        self.manual_backward(0.5 * self.loss((batch[0] + 1, batch[1])))
        self.log("norm", norm(kept))
        torch._foreach_mul_(kept, 0.5)
        optimizer.step()


@program()
class grads_kept_in_two_parts(TwoParts):
    """Two optimizers; one steps twice as often, and all gradients are kept."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[name].parameters(), 0.1, momentum=0.9) for name in "ab"]  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.use("a", batch) + self.use("b", batch))
        if batch_idx == 0:
            self.kept = [param.grad for param in self.net.parameters()]
        self.log("norm", norm(self.kept))
        first.step()
        torch._foreach_mul_(self.kept[2:], 0.5)
        first.zero_grad(set_to_none=False)
        self.log("later", norm(self.kept))
        if batch_idx % 2:
            second.step()
            self.kept[2].zero_()
            self.kept[3].zero_()


@program()
class grads_kept_of_an_unused_part(TwoParts):
    """The second of two networks has a gradient in the first step only, and is kept."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.use("a", batch) + (self.use("b", batch) if batch_idx == 0 else 0 * self.use("b", batch))
        self.manual_backward(loss)
        if batch_idx == 0:
            self.kept = [param.grad for param in self.net.parameters()]
        self.log("norm", norm(self.kept))
        self.kept[0].mul_(0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        self.kept[3].add_(0.1)  # before the backward: it counts


@program()
class grads_kept_vector(_Kept):
    """Kept gradients go through `parameters_to_vector` and back."""

    def use(self) -> None:
        vector = nn.utils.parameters_to_vector(self.kept)
        vector = vector * torch.clamp(0.1 / vector.norm(), max=1.0)
        nn.utils.vector_to_parameters(vector, self.kept)
        self.log("norm", norm(self.kept))


@program()
class grads_kept_noise(_Kept):
    """Noise is added to kept gradients in `on_before_optimizer_step`, by one generator on all ranks."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        generator = torch.Generator().manual_seed(self.global_step)
        for grad in self.kept:
            grad.add_(torch.randn(grad.shape, generator=generator).to(grad.device), alpha=0.01)


def _fabric(run: Run, use: Callable[[list[Tensor]], None]) -> None:
    kept: list[Tensor] = []
    norms = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        backward(fabric, model, batch)
        if not kept:
            kept.extend(param.grad for param in model.parameters())
        norms.append(norm(kept))
        use(kept)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    train(run, step)
    run.keep(norms=torch.stack(norms))


@fabric_program()
def fabric_kept_gradients(run: Run) -> None:
    """Fabric: gradients are kept, read, and scaled."""
    _fabric(run, lambda kept: torch._foreach_mul_(kept, 0.5))


@program(reference="single")
class grads_kept_by_backward_of_tensor(Manual):
    """`loss.backward()`; gradients are kept, and the next step adds to half of them."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()
        if batch_idx == 0:
            self.kept = [param.grad for param in self.net.parameters()]
        self.log("norm", norm(self.kept))
        self.optimizers().step()
        torch._foreach_mul_(self.kept, 0.5)


@program(trainer={"max_epochs": 2}, reference="single")
class grads_kept_and_unfrozen(_Scaled, Unfreezes):
    """Gradients are kept, and later a layer is unfrozen."""

    def take(self) -> list[Tensor]:
        return [param.grad for param in self.net.parameters() if param.grad is not None]

    def on_train_end(self) -> None:
        assert len(self.kept) == 2


@program()
class grads_kept_for_a_while(_Scaled):
    """Gradients are kept for two steps, and then others, one of which stays."""

    def use(self) -> None:
        super().use()
        if self.global_step == 1:
            self.kept = []
        if self.global_step == 2:
            self.kept = self.kept[:1]


@program()
class grads_kept_of_two_steps(Manual):
    """Two steps with one gradient, which is changed between them by the kept tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        kept = [param.grad for param in self.net.parameters()]
        optimizer.step()
        torch._foreach_mul_(kept, -0.5)
        optimizer.step()
        self.log("norm", norm(kept))


@program(refused={"fsdp*": Refusal("RuntimeError", r"was written before optimizer\.step\(\).*Assign a copy")})
class grads_assigned_then_scaled(Manual):
    """Parts of one tensor are assigned to `param.grad` after the backward, and it is scaled before the step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        params = list(self.net.parameters())
        flat = nn.utils.parameters_to_vector(param.grad for param in params)  # type: ignore[misc]
        for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
            param.grad = part.view_as(param)
        flat.mul_(0.5)
        optimizer.step()


@program(without=("stage[123]*", "fsdp*"))  # which refuse it
class grads_kept_of_an_embedding(_Kept):
    """The sparse gradient of an embedding, where it is not refused, and others are kept."""

    def build(self) -> nn.Module:
        return _Embeds()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)

    def use(self) -> None:
        self.log("norm", norm([grad.to_dense() if grad.is_sparse else grad for grad in self.kept]))


@program()
class grads_kept_around_a_penalty(Manual):
    """`torch.autograd.grad` of the weights and of the input, between writes to kept gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        x = batch[0].clone().requires_grad_()
        out = self(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        self.manual_backward(F.mse_loss(out, batch[1]) + slope.square().sum())
        if batch_idx == 0:
            self.kept = [param.grad for param in self.net.parameters()]
        self.log("norm", norm(self.kept))
        torch.autograd.grad(self(batch[0]).sum(), list(self.net.parameters()))
        torch._foreach_mul_(self.kept, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@program()
class grads_kept_by_a_closure(Manual):
    """A closure zeroes, runs the backward, and scales the kept gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = self.loss(batch)
            self.manual_backward(loss)
            if batch_idx == 0:
                self.kept = [param.grad for param in self.net.parameters()]
            torch._foreach_mul_(self.kept, 0.5)
            self.log("norm", norm(self.kept))
            return loss

        optimizer.step(closure)


@program(reference="ddp_find_unused_parameters_true")
class grads_kept_of_toggled(TwoParts):
    """Two optimizers that are toggled; each zeroes in place, and its gradients are kept and scaled."""

    configure_optimizers = grads_kept_in_two_parts.configure_optimizers

    def on_fit_start(self) -> None:
        self.kept: dict[str, list[Tensor]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, name in zip(self.optimizers(), "ab", strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad(set_to_none=False)
            self.manual_backward(self.use(name, batch))
            if batch_idx == 0:
                self.kept[name] = [param.grad for param in self.net[name].parameters()]  # type: ignore[index]
            self.log(f"norm_{name}", norm(self.kept[name]))
            torch._foreach_mul_(self.kept[name], 0.5)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


@program()
class grads_kept_except_one(_Scaled):
    """Gradients are zeroed in place, but one is set to None: what is kept of it stays."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)
        self.net[0].bias.grad = None  # type: ignore[index]


class _Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8, sparse=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x.abs().long().clamp(max=7)).mean(1))


@fabric_program()
def fabric_kept_gradients_clipped(run: Run) -> None:
    """Fabric: `clip_gradients` clips kept gradients, whose norms are compared."""
    kept: list[Tensor] = []
    norms = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        backward(fabric, model, batch)
        if not kept:
            kept.extend(param.grad for param in model.parameters())
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.2))
        norms.append(norm(kept))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    train(run, step)
    run.keep(norms=torch.stack(norms))


@fabric_program()
def fabric_kept_gradients_accumulate(run: Run) -> None:
    """Fabric: two batches per step, the first within `no_backward_sync`; what is kept is halved instead of zeroed."""
    seen: list[Any] = []
    kept: list[Tensor] = []
    norms = []

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        seen.append(batch)
        waits = len(seen) % 2 == 1
        with fabric.no_backward_sync(model, enabled=waits):
            fabric.backward(loss_of(model, batch) / 2)
        if waits:
            return
        if not kept:
            kept.extend(param.grad for param in model.parameters())
        norms.append(norm(kept))
        torch._foreach_mul_(kept, 0.5)
        optimizer.step()
        torch._foreach_mul_(kept, 0.5)

    train(run, step)
    run.keep(norms=torch.stack(norms))
