"""Weights and gradients that are read and written by kernels of users, by overloads of torch's, and by numpy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.programs.base import Manual, Regression
from tests.programs.own_optimizers import _Own
from tests.programs.program import Refusal, program
from tests.programs.run import Run


@torch.library.custom_op("zeroplus_programs::step", mutates_args=("param", "moment"))
def _step(param: Tensor, grad: Tensor, moment: Tensor, lr: float) -> None:
    """A step as a kernel makes it: of all its arguments, it writes two."""
    moment.mul_(0.9).add_(grad)
    param.add_(moment.clamp(-1, 1) + 0.1 * grad.norm() * moment, alpha=-lr)


@torch.library.custom_op("zeroplus_programs::shrink", mutates_args=("tensor",))
def _shrink(scale: float, tensor: Tensor) -> Tensor:
    """Write a tensor, and give another one."""
    tensor.mul_(scale)
    return tensor.norm()


class _Kernel(_Own):
    """As bitsandbytes' optimizers."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        moment = state.setdefault("moment", torch.zeros_like(param, dtype=torch.float32))
        torch.ops.zeroplus_programs.step(param, grad, moment, lr)


@program({"max_epochs": 2}, on_three_ranks=True)
class stepped_by_a_kernel(Regression):
    """An optimizer whose update is a custom operator, which uses the norm of the gradient."""

    def configure_optimizers(self) -> Any:
        return _Kernel(self.parameters(), 0.05)


@program()
class weights_shrunk_by_a_kernel(Regression):
    """A custom operator writes to the weights after every batch, by its name, and by its overload."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        norms = []
        with torch.no_grad():
            for param in self.parameters():
                norms += [torch.ops.zeroplus_programs.shrink(0.9, param)]
                norms += [torch.ops.zeroplus_programs.shrink.default(0.95, param.data)]
        self.log("norms", torch.stack(norms).sum())


@program()
class weights_written_by_overloads(Regression):
    """`torch.ops.aten.clamp_.default(weight, ...)` and its like, after every batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for param in self.parameters():
                torch.ops.aten.clamp_.default(param, -0.2, 0.2)
                torch.ops.aten.mul_.Tensor(param, torch.tensor(0.9))
                torch.ops.aten.add_(param, 0.01)


@program()
class kept_and_shrunk_by_a_kernel(Regression):
    """The same with what `param.data` and `param.detach()` gave when training began."""

    def on_train_start(self) -> None:
        self.kept = [give(param) for param in self.parameters() for give in (lambda p: p.data, Tensor.detach)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        norms = [torch.ops.zeroplus_programs.shrink(0.9, tensor) for tensor in self.kept]
        self.log("norms", torch.stack(norms).sum())


@program()
class gradients_shrunk_by_a_kernel(Manual):
    """A custom operator scales the gradients before the step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) / 2)
        self.manual_backward(self.loss(batch) / 2)
        norms = [torch.ops.zeroplus_programs.shrink(0.5, param.grad) for param in self.parameters()]
        self.log("norms", torch.stack(norms).sum())
        optimizer.step()


@program()
class weights_written_by_numpy(Regression):
    """`param.detach().numpy()` is written after every batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for param in self.parameters():
            array = param.detach().numpy()
            np.clip(array, -0.2, 0.2, out=array)
            np.asarray(param.data)[...] *= 0.9


@program()
class weights_read_by_numpy(Regression):
    """Their norms by numpy, and arrays that were kept for one batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = [param.detach().cpu().numpy().copy() for param in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = [param.detach().cpu().numpy() for param in self.parameters()]
        ways = [np.linalg.norm(new - old) for new, old in zip(now, self.before, strict=True)]
        self.log("way", float(sum(ways)))
        self.log("norm", float(sum(np.linalg.norm(np.asarray(param.detach().cpu())) for param in self.parameters())))


@program()
class gradients_written_by_numpy(Manual):
    """Gradients are clipped by numpy."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for param in self.parameters():
            array = param.grad.numpy()  # type: ignore[union-attr]
            np.clip(array, -0.05, 0.05, out=array)
        optimizer.step()


class _NumpyStep(Optimizer):
    """Steps by numpy."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                array = param.detach().numpy()
                array -= group["lr"] * np.sign(param.grad.numpy())
        return loss


@program()
class stepped_by_numpy(Regression):
    """An optimizer whose update is numpy's."""

    def configure_optimizers(self) -> Any:
        return _NumpyStep(self.parameters(), 0.02)


class _ByAddress(_Own):
    """As a kernel of Triton, which gets addresses."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        first, second = ((ctypes.c_float * each.numel()).from_address(each.data_ptr()) for each in (param, grad))
        np.ctypeslib.as_array(first)[:] -= lr * np.sign(np.ctypeslib.as_array(second))


@program()
class stepped_by_address(Regression):
    """An optimizer that writes to the addresses of weights."""

    def configure_optimizers(self) -> Any:
        return _ByAddress(self.parameters(), 0.02)


@program()
class tied_found_by_address(Regression):
    """Weights that are tied are found by `data_ptr()`, to count each once."""

    def build(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 4, bias=False))
        net[2].weight = net[0].weight
        return net

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        named = self.net.named_parameters(remove_duplicate=False)
        once = {param.data_ptr(): param for _, param in named}.values()
        self.log("weights", float(len(once)))
        self.log("norm", torch.stack([param.detach().norm() for param in once]).sum())


@program()
class kept_array(Regression):
    """An array of the weights is kept when training begins, and read after every batch."""

    def on_train_start(self) -> None:
        self.arrays = [param.detach().numpy() for param in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("norm", float(sum(np.linalg.norm(array) for array in self.arrays)))


@program()
class kept_array_from_init(Regression):
    """An array of the weights is kept in `__init__`, read after every batch, and written after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays = [param.detach().numpy() for param in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("norm", float(sum(np.linalg.norm(array) for array in self.arrays)))
        if batch_idx == 1:
            for array in self.arrays:
                array *= 0.9


@program()
def kept_array_over_two_fits(run: Run) -> None:
    """Arrays of the weights are kept in the first fit, used after it, and in the second."""
    module = kept_array()
    run.fit(module)
    run.keep(between=float(sum(np.linalg.norm(array) for array in module.arrays)))
    module.arrays[0][:] *= 0.5
    run.fit(module)
    run.keep(after=float(sum(np.linalg.norm(array) for array in module.arrays)))


@program(on_three_ranks=True)
class kept_array_of_one_rank(Regression):
    """Rank 0 alone keeps an array of the weights, and reads it after every batch."""

    def on_train_start(self) -> None:
        if self.global_rank == 0:
            self.arrays = [param.detach().numpy() for param in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.log("norm", float(sum(np.linalg.norm(array) for array in self.arrays)), rank_zero_only=True)


@program()
class kept_array_and_files(Regression):
    """Kept arrays are written right before a `state_dict()`, a checkpoint, a validation, and clipping."""

    def on_train_start(self) -> None:
        self.arrays = [param.detach().numpy() for param in self.parameters()]

    def on_after_backward(self) -> None:
        self.gradients = [param.grad.numpy() for param in self.parameters()]  # type: ignore[union-attr]
        for array in self.gradients:
            array *= 2

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        del self.gradients
        for array in self.arrays:
            array *= 0.9
        self.log("norm", torch.stack([value.norm() for value in self.state_dict().values()]).sum())
        for array in self.arrays:
            array *= 0.9
        if batch_idx == 2:
            for array in self.arrays:
                array += 0.1
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/{batch_idx}.ckpt")

    def on_validation_start(self) -> None:
        for array in self.arrays:
            array *= 0.9


@program(refused={"fsdp*": Refusal("RuntimeError", "kept over a step.*Keep a copy")})
class kept_array_of_gradients(Manual):
    """Arrays of gradients are kept when training begins, and read after later backwards; gradients are zeroed."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad(set_to_none=False)
        self.manual_backward(self.loss(batch))
        if batch_idx == 0:
            self.arrays = [param.grad.numpy() for param in self.parameters()]  # type: ignore[union-attr]
        self.log("norm", float(sum(np.linalg.norm(array) for array in self.arrays)))
        optimizer.step()


@program()
class weights_written_by_dlpack(Regression):
    """Tensors that other libraries get by DLPack are written after every batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for param in self.parameters():
            torch.from_dlpack(param.detach()).mul_(0.9)
            torch.from_dlpack(param.data).clamp_(-0.2, 0.2)


@torch.jit.script
def _scripted(param: Tensor, grad: Tensor, moment: Tensor, lr: float) -> None:
    moment.mul_(0.9).add_(grad)
    param.add_(moment * (param.norm() / (grad.norm() + 1e-6)), alpha=-lr)


class _Scripted(_Own):
    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        _scripted(param, grad, state.setdefault("moment", torch.zeros_like(param)), lr)


@program()
class stepped_by_a_script(Regression):
    """An optimizer whose update is a scripted function, with norms."""

    def configure_optimizers(self) -> Any:
        return _Scripted(self.parameters(), 0.02)


@torch.compile(backend="eager", dynamic=False)
def _compiled(param: Tensor, grad: Tensor, moment: Tensor, lr: float) -> None:
    moment.mul_(0.9).add_(grad)
    param.add_(moment * (param.norm() / (grad.norm() + 1e-6)), alpha=-lr)


class _Compiled(_Own):
    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        _compiled(param, grad, state.setdefault("moment", torch.zeros_like(param)), lr)


@program()
class stepped_by_a_compiled_function(Regression):
    """An optimizer whose update is a compiled function, with norms."""

    def configure_optimizers(self) -> Any:
        return _Compiled(self.parameters(), 0.02)
