"""Gradients that are read, within a backward or after it, while some of what they are made of is not reduced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.programs.base import Manual, Regression, step
from tests.programs.program import Refusal, program

_BOTH = Refusal("RuntimeError", r"sum of an average and of this rank's own gradient.*Do it before the window")
_ZERO = dict.fromkeys(("stage[0-3]", "stage[0-3]_*"), _BOTH)
_FSDP = dict.fromkeys(
    ("fsdp", "fsdp_*"),
    Refusal(
        "RuntimeError", r"`param\.grad` (was read or written after|is not reduced yet inside) .*block_backward_sync"
    ),
)


class _Reads(Manual):
    """Two layers; what is read goes to the log."""

    def note(self) -> None:
        grads = [param.grad for param in self.net.parameters()]
        norms = [grad.detach().norm() for grad in grads if grad is not None]
        for index, norm in enumerate(norms):
            self.log(f"norm{index}", norm, sync_dist=True)

    def blocked(self, loss: Tensor) -> None:
        with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            self.manual_backward(loss)


@program(refused=_ZERO | _FSDP)
class read_after_a_blocked_one(_Reads):
    """A backward, another in `block_backward_sync()`; `param.grad` is read, then a third backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.blocked(0.5 * self.loss(batch))
        self.note()
        self.manual_backward(0.25 * self.loss(batch))
        step(self.optimizers())


@program(refused=_ZERO | _FSDP)
class read_in_a_blocked_one(_Reads):
    """The same; `param.grad` is read in `block_backward_sync()`, after the backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            self.manual_backward(0.5 * self.loss(batch))
            self.note()
        self.manual_backward(0.25 * self.loss(batch))
        step(self.optimizers())


_WITHIN = Refusal("RuntimeError", r"`param\.grad` was read .*(before|after) the window")


@program(refused=dict.fromkeys(("stage[0-3]", "stage[0-3]_*"), _WITHIN) | _FSDP)
class read_before_a_blocked_one(_Reads):
    """The same; `param.grad` is read in `block_backward_sync()`, before the backward there."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            self.note()
            self.manual_backward(0.5 * self.loss(batch))
        self.manual_backward(0.25 * self.loss(batch))
        step(self.optimizers())


@program(refused=_ZERO | _FSDP)
class read_in_the_next_batch(_Reads):
    """The backward of one batch reduces, that of the next one does not, and `param.grad` is read after it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            self.manual_backward(self.loss(batch))
            return
        self.blocked(0.5 * self.loss(batch))
        self.note()
        self.manual_backward(0.25 * self.loss(batch))
        step(self.optimizers())


@program(refused=dict.fromkeys(("stage[123]", "stage[123]_*"), _BOTH) | _FSDP)
class read_without_zeroing(_Reads):
    """No `zero_grad()`: a backward in `block_backward_sync()`, a read, another backward, a step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.blocked(0.5 * self.loss(batch))
        self.note()
        self.manual_backward(0.25 * self.loss(batch))
        self.optimizers().step()  # type: ignore[union-attr]


@program(refused=_FSDP)
class read_after_zeroing(_Reads):
    """The same as the first, but for a `zero_grad()` after the first backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        self.blocked(0.5 * self.loss(batch))
        self.note()
        self.manual_backward(0.25 * self.loss(batch))
        step(self.optimizers())


@program()
class zeroed_by_modules(_Reads):
    """A backward, another in `block_backward_sync()`, both zeroed by the module's `zero_grad()`; another backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.blocked(0.5 * self.loss(batch))
        self.net.zero_grad(set_to_none=batch_idx % 2 == 0)
        self.manual_backward(0.25 * self.loss(batch))
        self.note()
        step(self.optimizers())


@program(refused=_FSDP)
class read_after_modules_zeroed(_Reads):
    """A backward, another in `block_backward_sync()`, both dropped by the module; one more there, which is read."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.blocked(0.5 * self.loss(batch))
        self.net.zero_grad()
        self.blocked(0.3 * self.loss(batch))
        self.note()
        self.manual_backward(0.25 * self.loss(batch))
        step(self.optimizers())


@program(reference="ddp_find_unused_parameters_true", refused=_FSDP)
class read_of_another_layer(_Reads):
    """A backward of one layer, one of another in `block_backward_sync()`, whose gradient is read; one of both."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, _, last = self.net.children()
        self.manual_backward(first(batch[0]).square().mean())
        self.blocked(last(torch.full((4, 16), self.global_rank + 1.0)).square().mean())
        self.log("norm", last.weight.grad.norm(), sync_dist=True)  # type: ignore[union-attr,operator]
        self.manual_backward(0.25 * self.loss(batch))
        step(self.optimizers())


class _Validated(Regression):
    """A validation in the middle of an accumulation reads the gradients."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        grads = [param.grad for param in self.net.parameters()]
        for index, grad in enumerate(grads):
            if grad is not None:
                self.log(f"norm{index}", grad.norm(), sync_dist=True)


_EVERY = {"val_check_interval": 1, "limit_val_batches": 1}


@program(trainer={"accumulate_grad_batches": 2, **_EVERY})
class validation_within_two_batches(_Validated):
    """A validation step in the middle of an accumulation of two batches reads `param.grad`."""


@program(trainer={"accumulate_grad_batches": 3, **_EVERY})
class validation_within_three_batches(_Validated):
    """The same of three batches."""


# -- hooks that read within a backward --------------------------------------------------------------------------------

_PARTIAL = Refusal("RuntimeError", r"in a hook within a backward.*register_post_accumulate_grad_hook")
_DONE = ("stage[23]", "stage[23]_o*", "fsdp_wrap")  # these reduce in the middle of a backward


class _Compares(Manual):
    """A tensor hook keeps what has the sign of the gradients before."""

    def on_train_start(self) -> None:
        weight: Any = self.net[2].weight  # type: ignore[index]
        weight.register_hook(lambda grad: grad if weight.grad is None else grad * (weight.grad > 0))


@program(refused=dict.fromkeys(("*",), _PARTIAL))
class compares_with_earlier(_Compares):
    """A tensor hook compares with the sign of what an earlier backward has brought."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.manual_backward(0.5 * self.loss(batch))
        step(self.optimizers())


@program()
class compares_with_own(_Compares):
    """The same, and the earlier one was in `block_backward_sync()`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            self.manual_backward(self.loss(batch))
        self.manual_backward(0.5 * self.loss(batch))
        step(self.optimizers())


class _Three(Manual):
    """A hook of the first of three layers reads the gradient of another one."""

    read = 4

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def on_train_start(self) -> None:
        first: Any = self.net[0].weight  # type: ignore[index]
        first.register_post_accumulate_grad_hook(self._scale)

    def _scale(self, param: Any) -> None:
        other: Any = self.net[self.read].weight  # type: ignore[index]
        if other.grad is not None:
            param.grad.mul_(1 + other.grad.norm())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        step(self.optimizers())


@program(refused=dict.fromkeys(_DONE, _PARTIAL))
class reads_the_last_layer(_Three):
    """A post-accumulate hook of the first of three layers scales by the norm of the last one's gradient."""


@program(refused=dict.fromkeys(_DONE, _PARTIAL))
class reads_the_next_layer(_Three):
    """The same of the second one."""

    read = 2


@program(refused=dict.fromkeys(_DONE, _PARTIAL))
class reads_the_last_layer_in_a_module_hook(_Three):
    """A backward hook of the first layer logs the norm of the last one's gradient."""

    def on_train_start(self) -> None:
        self.net[0].register_full_backward_hook(self._log)  # type: ignore[index]

    def _log(self, *args: Any) -> None:
        other: Any = self.net[4].weight  # type: ignore[index]
        if other.grad is not None:
            self.log("norm", other.grad.norm(), sync_dist=True)


@program()
class reads_the_own_layer_in_a_module_hook(_Three):
    """A backward hook of each layer asks whether its weight has a gradient from before."""

    def on_train_start(self) -> None:
        for layer in self.net.children():
            layer.register_full_backward_pre_hook(self._log)

    def _log(self, layer: Any, *args: Any) -> None:
        if isinstance(layer, nn.Linear):
            self.log("there", float(layer.weight.grad is not None), sync_dist=True)
