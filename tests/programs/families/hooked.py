"""Hooks that run after a gradient was accumulated, over several backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.programs.base import Manual, Regression, step
from tests.programs.program import Refusal, program


def _halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad * 0.5


def _clamp(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.clamp_(-0.01, 0.01)


def _halves(batch: Any) -> list[list[Tensor]]:
    return [[each[part] for each in batch] for part in (slice(0, 2), slice(2, None))]


class _TwoBackwards(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        for part in _halves(batch):
            self.manual_backward(self.loss(part))
        step(self.optimizers())


class _NoSync(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = _halves(batch)
        with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            self.manual_backward(self.loss(first))
        self.manual_backward(self.loss(second))
        step(self.optimizers())


class _Clamps(Regression):
    def on_train_start(self) -> None:
        for param in self.net.parameters():
            param.register_post_accumulate_grad_hook(_clamp)


@program(trainer={"accumulate_grad_batches": 2})
class replaced_while_accumulating(Regression):
    """A post-accumulate hook, set in the fit, assigns `param.grad`; `accumulate_grad_batches=2`."""

    def on_train_start(self) -> None:
        for param in self.net.parameters():
            param.register_post_accumulate_grad_hook(_halve)


@program()
class replaced_once(Regression):
    """A post-accumulate hook, set in the fit, assigns `param.grad`."""

    def on_train_start(self) -> None:
        for param in self.net.parameters():
            param.register_post_accumulate_grad_hook(_halve)


@program()
class clamped_in_several_backwards(_Clamps, _TwoBackwards):
    """A post-accumulate hook clamps what two backwards of a step have accumulated."""


@program()
class replaced_in_several_backwards(_TwoBackwards):
    """A post-accumulate hook of two parameters assigns what two backwards of a step have accumulated."""

    def on_train_start(self) -> None:
        for param in (self.net[0].weight, self.net[2].bias):  # type: ignore[index]
            param.register_post_accumulate_grad_hook(_halve)  # type: ignore[union-attr]


@program()
class dropped_in_several_backwards(_TwoBackwards):
    """A post-accumulate hook of one parameter reads what is accumulated, and drops it after the first backward."""

    def on_train_start(self) -> None:
        self.norms: list[Tensor] = []

        def hook(param: Any) -> None:
            self.norms.append(param.grad.norm())
            if len(self.norms) % 2:
                param.grad = None

        self.net[2].weight.register_post_accumulate_grad_hook(hook)  # type: ignore[index,union-attr,operator]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("second", self.norms[-1], sync_dist=True)


@program(trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.5})
class hooks_from_the_beginning(Regression):
    """A post-accumulate hook, set in `__init__`, clamps what three batches have accumulated; clipped by norm."""

    def __init__(self) -> None:
        super().__init__()
        for param in self.net.parameters():
            param.register_post_accumulate_grad_hook(_clamp)


@program(trainer={"accumulate_grad_batches": 2}, precision="bf16-mixed", reference_precision="bf16-mixed")
class hooks_in_bf16(replaced_while_accumulating):
    """The same as with `accumulate_grad_batches=2`, in `bf16-mixed`."""


@program(trainer={"accumulate_grad_batches": 2})
class norms_while_accumulating(Regression):
    """A post-accumulate hook, which is removed after three batches, logs the norm of what was accumulated."""

    def on_train_start(self) -> None:
        self.norms: list[Tensor] = []
        weight: Any = self.net[0].weight  # type: ignore[index]
        self.handle = weight.register_post_accumulate_grad_hook(lambda param: self.norms.append(param.grad.norm()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.handle.remove()
        if batch_idx < 3:
            self.log("local", self.norms[-1], sync_dist=True)


class _OnOneRank(Regression):
    """A post-accumulate hook of one rank reads and changes what this rank has accumulated."""

    def on_train_start(self) -> None:
        if self.global_rank == 0:
            for param in (self.net[0].weight, self.net[2].bias):  # type: ignore[index]
                param.register_post_accumulate_grad_hook(_clamp)  # type: ignore[union-attr]


@program(trainer={"accumulate_grad_batches": 2}, on_three_ranks=True)
class hooks_on_one_rank(_OnOneRank):
    """A post-accumulate hook of one rank clamps what this rank has accumulated; `accumulate_grad_batches=2`."""


@program(on_three_ranks=True)
class hooks_on_one_rank_in_several_backwards(_OnOneRank, _TwoBackwards):
    """The same in two backwards of a step."""


@program()
class hooks_after_no_sync(_Clamps, _NoSync):
    """A post-accumulate hook clamps what a backward in `no_sync()` and one after it accumulate."""


_DIRECT = Refusal("RuntimeError", r"register_post_accumulate_grad_hook.*self\.manual_backward")


@program(reference="single", refused=dict.fromkeys(("fsdp", "fsdp_*"), _DIRECT))
class hooks_and_direct_backwards(Manual):
    """A post-accumulate hook halves what two `loss.backward()` accumulate."""

    def on_train_start(self) -> None:
        for param in self.net.parameters():
            param.register_post_accumulate_grad_hook(_halve)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for weight in (1.0, 0.3):
            (weight * self.loss(batch)).backward()
        step(self.optimizers())


@program(refused=dict.fromkeys(("fsdp", "fsdp_*"), _DIRECT))
class clamps_in_direct_backwards(_Clamps, Manual):
    """A post-accumulate hook clamps what two `loss.backward()` accumulate; two `manual_backward()` under DDP."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        is_averaged = hasattr(self.trainer.strategy, "coalesce")
        for weight in (1.0, 0.3):
            loss = weight * self.loss(batch)
            loss.backward() if is_averaged else self.manual_backward(loss)
        step(self.optimizers())


@program(trainer={"accumulate_grad_batches": 2})
class hooks_of_several_gradients(Regression):
    """`register_multi_grad_hook`: one hook logs the norm of all gradients, one runs when the first of them comes."""

    def on_train_start(self) -> None:
        params = tuple(self.net.parameters())
        self.first = 0
        self.handles = [
            torch.autograd.graph.register_multi_grad_hook(params, self._all),
            torch.autograd.graph.register_multi_grad_hook(params, self._any, mode="any"),
        ]

    def _all(self, grads: Any) -> None:
        self.log("norm", torch.stack([grad.norm() for grad in grads]).norm(), sync_dist=True)

    def _any(self, grad: Tensor) -> None:
        self.first += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("first", float(self.first), sync_dist=True)
        if batch_idx == 2:
            for handle in self.handles:
                handle.remove()


@program()
class gradient_of_an_edge(Manual):
    """`torch.autograd.grad` with respect to the `GradientEdge` of a weight; the weight trains on, too."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        edge = torch.autograd.graph.get_gradient_edge(self.net[0].weight)  # type: ignore[index,arg-type]
        loss = self.loss(batch)
        (grad,) = torch.autograd.grad(loss, edge, retain_graph=True)
        self.log("norm", grad.norm(), sync_dist=True)
        self.manual_backward(loss)
        step(self.optimizers())


class _Reads(Regression):
    """A tensor hook adds a part of what was accumulated before to the gradient that comes."""

    def on_train_start(self) -> None:
        weight: Any = self.net[2].weight  # type: ignore[index]

        def hook(grad: Tensor) -> Tensor:
            return grad if weight.grad is None else grad + 0.5 * weight.grad

        weight.register_hook(hook)


@program()
class reads_in_one_backward(_Reads):
    """A tensor hook reads `param.grad`, which is None as long as there is one backward in a step."""


_AVERAGED = Refusal("RuntimeError", r"in a hook within a backward.*register_post_accumulate_grad_hook")
_IN_EACH = ("stage[23]", "stage2_[ol]*", "stage3_o*", "fsdp", "fsdp_wrap")  # these reduce in each backward


@program(refused={"*": _AVERAGED})
class reads_in_the_second_backward(_Reads, _TwoBackwards):
    """A tensor hook adds half of what earlier backwards of the step have accumulated to what comes."""


@program()
class reads_after_no_sync(_Reads, _NoSync):
    """The same after a backward in `no_sync()`."""


@program(trainer={"accumulate_grad_batches": 2}, refused=dict.fromkeys(_IN_EACH, _AVERAGED))
class reads_while_accumulating(_Reads):
    """The same with `accumulate_grad_batches=2`."""
