"""Evaluation steps with gradients: under DDP they are each rank's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.base import Regression
from tests.programs.program import Refusal, program
from tests.programs.run import Run


class _Evaluates(Regression):
    """Subclasses say what an evaluation step logs."""

    def evaluate(self, batch: Any) -> Any:
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("evaluated", self.evaluate(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", self.evaluate(batch), sync_dist=True)


def _validates(made: Callable[[], _Evaluates], run: Run, **trainer: Any) -> None:
    run.fit(made(), run.loader(), run.loader(2), max_epochs=2, inference_mode=False, **trainer)


class _Saliency(_Evaluates):
    zeroes = False

    def evaluate(self, batch: Any) -> Any:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            F.mse_loss(self(x), batch[1]).backward()
        if self.zeroes:
            self.zero_grad()
        return x.grad.abs().sum()


@program()
def saliency_in_validation(run: Run) -> None:
    """A backward in validation, for the gradient of the input; what it leaves is zeroed by the next step."""
    _validates(_Saliency, run, val_check_interval=2)


@program()
def saliency_while_accumulating(run: Run) -> None:
    """The same in the middle of a window of two batches: the next step has these gradients, too."""
    _validates(_Saliency, run, val_check_interval=1, accumulate_grad_batches=2)


@program()
def saliency_in_validation_zeroed(run: Run) -> None:
    """The same, zeroed by the module."""

    class Zeroes(_Saliency):
        zeroes = True

    _validates(Zeroes, run)


class _Activations(_Evaluates):
    def evaluate(self, batch: Any) -> Any:
        kept: list[Tensor] = []

        def keep(layer: Any, args: Any, output: Tensor) -> None:
            output.retain_grad()
            kept.append(output)

        with torch.enable_grad():
            handle = self.net[0].register_forward_hook(keep)  # type: ignore[index]
            self(batch[0])[:, 0].sum().backward()
            handle.remove()
        self.zero_grad()
        assert kept[0].grad is not None
        return (kept[0].grad.mean(0) * kept[0].mean(0)).sum()


@program()
def class_activation_map(run: Run) -> None:
    """Grad-CAM in validation: a hook keeps an activation, whose gradient is read."""
    _validates(_Activations, run)


@program()
def adversarial_test(run: Run) -> None:
    """The fast gradient sign method in `trainer.test`, after the fit."""

    class Attacked(_Evaluates):
        def evaluate(self, batch: Any) -> Any:
            with torch.enable_grad():
                x = batch[0].clone().requires_grad_()
                F.mse_loss(self(x), batch[1]).backward()
            return F.mse_loss(self(x + 0.1 * x.grad.sign()), batch[1])

    module = Attacked()
    run.fit(module, inference_mode=False).test(module, run.loader(2), verbose=False)


class _Adapts(_Evaluates):
    def evaluate(self, batch: Any) -> Any:
        kept = copy.deepcopy(self.net.state_dict())
        for _ in range(2):
            with torch.enable_grad():
                loss = F.mse_loss(self(batch[0]), batch[1])
                grads = torch.autograd.grad(loss, list(self.net.parameters()))
            with torch.no_grad():
                for param, grad in zip(self.net.parameters(), grads, strict=True):
                    param -= 0.1 * grad
        adapted = F.mse_loss(self(batch[0]), batch[1])
        self.net.load_state_dict(kept)
        return adapted


@program(on_three_ranks=True)
def adapted_in_validation(run: Run) -> None:
    """Each rank takes some steps on a batch of its own, by `torch.autograd.grad`, and goes back."""
    _validates(_Adapts, run)


@program()
def adapted_by_data_in_validation(run: Run) -> None:
    """The same by `param.data.sub_`, of one layer."""

    class ByData(_Evaluates):
        def evaluate(self, batch: Any) -> Any:
            layer: Any = self.net[2]  # type: ignore[index]
            kept = layer.weight.data.clone()
            with torch.enable_grad():
                (grad,) = torch.autograd.grad(F.mse_loss(self(batch[0]), batch[1]), layer.weight)
            layer.weight.data.sub_(0.1 * grad)
            adapted = F.mse_loss(self(batch[0]), batch[1])
            layer.weight.data.copy_(kept)
            return adapted

    _validates(ByData, run)


@program()
def gradients_of_training_read_in_validation(run: Run) -> None:
    """Validation in mid-epoch logs the norm of the last step's gradient; it has no backward of its own."""

    class Reads(_Evaluates):
        def evaluate(self, batch: Any) -> Any:
            return sum(param.grad.norm() for param in self.parameters() if param.grad is not None)

    _validates(Reads, run, val_check_interval=2)


#: An optimizer reads `param.grad`.
_READS = Refusal("RuntimeError", r"`param\.grad` was read or written after a backward.*torch\.autograd\.grad")


class _MinimizesEntropy(_Evaluates):
    def evaluate(self, batch: Any) -> Any:
        kept = {name: value.clone() for name, value in self.net.state_dict().items()}
        with torch.enable_grad():
            optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
            for _ in range(2):
                loss = self(batch[0]).softmax(-1).square().sum(-1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        adapted = F.mse_loss(self(batch[0]), batch[1])
        self.net.load_state_dict(kept)
        return adapted


@program(refused={"fsdp*": _READS})
def entropy_minimized_in_validation(run: Run) -> None:
    """TENT: an optimizer of the step's own minimizes the entropy of each rank's batch, and goes back."""
    _validates(_MinimizesEntropy, run)
