"""Optimizers that look at a tensor as a whole, in loops with something more."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import lightning_zeroplus as zp
from tests.programs.base import Manual, Regression, Unfreezes, step
from tests.programs.own_optimizers import LAMB, LARS, SOAP, Adam8Bits, Wrapping, WrappingLion
from tests.programs.program import program
from tests.programs.run import Run, make_strategy


@program(reference="single", on_three_ranks=True)
class muon_beside_adamw(Manual):
    """Muon for the matrices and AdamW for the rest, each clipped and stepped by itself, AdamW not after every batch."""

    def configure_optimizers(self) -> Any:
        matrices = [param for param in self.parameters() if param.ndim == 2]
        vectors = [param for param in self.parameters() if param.ndim != 2]
        return torch.optim.Muon(matrices, 0.02), torch.optim.AdamW(vectors, 0.02)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        muon, adamw = self.optimizers()  # type: ignore[misc]
        self.manual_backward(self.loss(batch))
        self.clip_gradients(muon, 0.05, "norm")
        step(muon)
        if batch_idx % 2:
            self.clip_gradients(adamw, 0.01, "value")
            step(adamw)


class _LAMB(Regression):
    def configure_optimizers(self) -> Any:
        return LAMB(self.parameters(), 0.02)


@program({"accumulate_grad_batches": 2, "gradient_clip_val": 0.2})
class lamb_clipped(_LAMB):
    """LAMB with clipping by norm and accumulated gradients."""


@program({"gradient_clip_val": 0.2}, precision="bf16-mixed")
class adafactor_in_bf16_mixed(Regression):
    """Adafactor in bf16-mixed."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), 0.05)


@program({"gradient_clip_val": 0.2}, precision="16-true")
class lamb_in_16_true(_LAMB):
    """LAMB in 16-true."""


@program()
class lamb_states_written(_LAMB):
    """The first moments of LAMB are halved before the third batch, and all moments are logged."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        states = self.trainer.optimizers[0].state
        if batch_idx == 2:
            for param in self.parameters():
                states[param]["first"].mul_(0.5)
        for name, param in self.named_parameters():
            self.log(f"moment of {name}", states[param].get("second", torch.zeros(1)).sum())


@program()
class lars_with_a_late_group(Regression):
    """LARS; the last layer comes in a group of its own after the second batch."""

    def configure_optimizers(self) -> Any:
        return LARS(self.net[0].parameters(), 0.1)  # type: ignore[index]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.trainer.optimizers[0].add_param_group({"params": list(self.net[2].parameters()), "lr": 0.05})  # type: ignore[index]


@program(bound=1e-4, on_three_ranks=True)
def soap_resumed(run: Run) -> None:
    """SOAP, with a matrix in its state, resumed; then all of it is in `optimizer.state_dict()`."""

    class WithSOAP(Regression):
        def configure_optimizers(self) -> Any:
            return SOAP(self.parameters(), 0.01)

        def on_train_end(self) -> None:
            states = self.trainer.optimizers[0].state_dict()["state"]
            self.kept = sum(float(state["covariance"].sum()) for state in states.values() if "covariance" in state)

    path = run.folder / "one.ckpt"
    run.fit(WithSOAP()).save_checkpoint(path)
    module = WithSOAP()
    run.fit(module, max_epochs=2, ckpt_path=path)
    run.keep(covariances=module.kept)


class _AdagradOfTensors(torch.optim.Adagrad):
    """Adagrad whose steps are as long as the tensor's norm says."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = None if closure is None else closure()
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        before = [param.clone() for param in params]
        super().step()
        for param, old in zip(params, before, strict=True):
            param.copy_(old + (param - old) * old.norm())
        return loss


@program()
class adagrad_of_tensors(Regression):
    """A subclass of Adagrad, whose state begins with the optimizer, that uses the norms of tensors."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4))

    def configure_optimizers(self) -> Any:
        return _AdagradOfTensors(self.parameters(), 0.1, initial_accumulator_value=0.1)


class _In8Bits(Regression):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 72), nn.Tanh(), nn.Linear(72, 64), nn.Tanh(), nn.Linear(64, 4))

    def configure_optimizers(self) -> Any:
        return Adam8Bits(self.parameters(), 0.01)


@program(on_three_ranks=True)
class adam_in_8_bits(_In8Bits):
    """Adam with moments in 8 bits, of large tensors only: each block of 256 elements has a scale."""


@program()
def adam_in_8_bits_resumed(run: Run) -> None:
    """Adam with moments in 8 bits, resumed."""
    run.fit(_In8Bits()).save_checkpoint(run.folder / "one.ckpt")
    run.fit(_In8Bits(), max_epochs=2, ckpt_path=run.folder / "one.ckpt")


class _Wraps(_In8Bits):
    def configure_optimizers(self) -> Any:
        return Wrapping(self.parameters(), 0.01)


class _WrapsLion(Regression):
    def configure_optimizers(self) -> Any:
        return WrappingLion(self.parameters(), 0.01)


def _from_ddp(run: Run, make: type[Regression]) -> None:
    """A fit under DDP, which goes on under the strategy."""
    run.fit(make(), strategy=make_strategy("ddp")).save_checkpoint(run.folder / "one.ckpt")
    run.fit(make(), max_epochs=2, ckpt_path=run.folder / "one.ckpt")


@program()
def codes_resumed(run: Run) -> None:
    """As bitsandbytes: the dtype of a state tells whether it is in 8 bits; resumed."""
    run.fit(_Wraps()).save_checkpoint(run.folder / "one.ckpt")
    run.fit(_Wraps(), max_epochs=2, ckpt_path=run.folder / "one.ckpt")


@program()
def codes_of_ddp(run: Run) -> None:
    """The same, resumed from a checkpoint of DDP, in which `state_dict()` has wrapped the states."""
    _from_ddp(run, _Wraps)


@program()
def codes_under_ddp(run: Run) -> None:
    """The same, resumed under DDP, from the file that `zp.export(optimizer=True)` writes."""
    path = run.folder / "one.ckpt"
    trainer = run.fit(_Wraps())
    trainer.save_checkpoint(path)
    if path.is_dir():
        zp.export(path, run.folder / "two.ckpt", optimizer=True)
        trainer.strategy.barrier()
        path = run.folder / "two.ckpt"
    run.fit(_Wraps(), strategy=make_strategy("ddp"), max_epochs=2, ckpt_path=path)


@program({"max_epochs": 3}, reference="single")
class codes_and_unfrozen(Unfreezes):
    """The same optimizer, and a layer that is unfrozen: the states go to new partitions."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 72), nn.Tanh(), nn.Linear(72, 64), nn.Tanh(), nn.Linear(64, 4))

    def configure_optimizers(self) -> Any:
        return Wrapping(self.parameters(), 0.01)


@program()
def wrapped_states_of_ddp(run: Run) -> None:
    """An elementwise optimizer whose `state_dict()` wraps the states, resumed from a checkpoint of DDP."""
    _from_ddp(run, _WrapsLion)
