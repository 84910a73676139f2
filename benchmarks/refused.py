"""The programs that some of our strategies refuse, as plain loops of torch, and the peers that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

FSDP2 = ("FSDP2 by hand",)
ZERO = tuple(f"accelerate, ZeRO-{stage}" for stage in (1, 2, 3))
_ZERO_3 = ZERO[2:]


class Peer(Protocol):
    """How a program is set up and differentiated."""

    def prepare(self, module: nn.Module, *make: Callable[[Any], Optimizer]) -> tuple[Any, ...]:
        """Give the module to the strategy, then make optimizers of its parameters; returns the module and them."""

    def backward(self, loss: Tensor) -> None:
        """Differentiate the loss."""

    def weights(self, module: Any) -> dict[str, Tensor]:
        """Whole copies of all parameters, by the names in the module that was built."""


class _DDP:
    def prepare(self, module: nn.Module, *make: Callable[[Any], Optimizer]) -> tuple[Any, ...]:
        wrapped = nn.parallel.DistributedDataParallel(module)
        return wrapped, *(each(module.parameters()) for each in make)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def weights(self, module: Any) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in module.module.named_parameters()}


class _FSDP2:
    def prepare(self, module: nn.Module, *make: Callable[[Any], Optimizer]) -> tuple[Any, ...]:
        from torch.distributed.fsdp import fully_shard

        for child in module.children():
            if list(child.parameters(recurse=False)):
                fully_shard(child)
        fully_shard(module)
        return module, *(each(module.parameters()) for each in make)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def weights(self, module: Any) -> dict[str, Tensor]:
        return {name: param.full_tensor().detach().clone() for name, param in module.named_parameters()}


class _Accelerate:
    def __init__(self, stage: int) -> None:
        from accelerate import Accelerator, DeepSpeedPlugin

        config = {
            # A large model is reduced, and at stage 3 gathered, layer by layer. So is this small one.
            "zero_optimization": {
                "reduce_bucket_size": 100,
                "stage": stage,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
                "stage3_prefetch_bucket_size": 0,
            },
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,  # DeepSpeed clips to a norm of 1 otherwise
        }
        self.accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))

    def prepare(self, module: nn.Module, *make: Callable[[Any], Optimizer]) -> tuple[Any, ...]:
        from deepspeed import DeepSpeedEngine

        made: tuple[Any, ...] = self.accelerator.prepare(module, *(each(module.parameters()) for each in make))
        assert isinstance(made[0], DeepSpeedEngine), "accelerate did not use DeepSpeed"
        return made

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def weights(self, module: Any) -> dict[str, Tensor]:
        import deepspeed

        params = dict(module.module.named_parameters())
        with deepspeed.zero.GatheredParameters([p for p in params.values() if hasattr(p, "ds_id")]):
            return {name: param.detach().clone() for name, param in params.items()}


def make_peer(name: str) -> Peer:
    """The peer of this name."""
    if name == "ddp":
        return _DDP()
    return _FSDP2() if name == FSDP2[0] else _Accelerate(int(name[-1]))


class Net(nn.Module):
    """Two layers; a subclass changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x.to(self.first.weight.dtype))).to(self.second.weight.dtype))
        return out


class OneDouble(Net):
    """The first layer in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first.double()


class Complex(Net):
    """A complex factor in between, as in an FNO."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second((self.first(x) * self.factor).real)
        return out


class Three(Net):
    """A layer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.between(self.first(x))))
        return out


class Shared(Net):
    """The last layer has the first rows of the first one's weight, as its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight.data = self.first.weight.data[:4]


class Scripted(Net):
    """The last layer is compiled by ``torch.jit.script``."""

    def __init__(self) -> None:
        super().__init__()
        self.second = cast("nn.Linear", torch.jit.script(self.second))


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.table(x.abs().mul(4).long().clamp(max=15)).mean(1)
        return out


def batches(count: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's batches."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(count):
        yield torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def plain(peer: Peer, module: nn.Module, between: Callable[[Any, int], None] = lambda net, index: None) -> Any:
    """Train with SGD; ``between(net, index)`` is called after each step."""
    net, optimizer = peer.prepare(module, SGD)
    for index, (x, y) in enumerate(batches()):
        out = net(x)
        peer.backward(F.mse_loss(out, y.to(out.dtype)))
        optimizer.step()
        optimizer.zero_grad()
        between(net, index)
    return net


def _lbfgs(peer: Peer, module: nn.Module) -> Any:
    net, optimizer = peer.prepare(module, partial(torch.optim.LBFGS, lr=0.1, max_iter=3))
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            peer.backward(loss)
            dist.all_reduce(mean := loss.detach().clone())  # the line search is that of the mean, on all ranks
            return mean / dist.get_world_size()

        optimizer.step(closure)
    return net


class _ClipsItself(torch.optim.SGD):
    """Clips by the norm of all gradients, within its step."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 0.1)
        return super().step(closure)


class _Langevin(torch.optim.SGD):
    """Adds noise, from equal seeds on all ranks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(torch.randn_like(param), alpha=0.01)
        return loss


class _ByIdentity(torch.optim.SGD):
    """Shrinks a parameter that it knows by its ``id``."""

    known: int

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if id(param) == self.known:
                    param.mul_(0.9)
        return loss


def _by_identity(peer: Peer, module: nn.Module) -> Any:
    def make(params: Any) -> Optimizer:
        listed = list(params)
        optimizer = _ByIdentity(listed, lr=0.1)
        optimizer.known = id(listed[0])
        return optimizer

    net, optimizer = peer.prepare(module, make)
    for x, y in batches():
        optimizer.zero_grad()
        peer.backward(F.mse_loss(net(x), y))
        optimizer.step()
    return net


def _draws(peer: Peer, module: nn.Module) -> Any:
    net, optimizer = peer.prepare(module, partial(_Langevin, lr=0.1))
    for number, (x, y) in enumerate(batches()):
        torch.manual_seed(number)
        optimizer.zero_grad()
        peer.backward(F.mse_loss(net(x), y))
        optimizer.step()
    return net


def _clips_itself(peer: Peer, module: nn.Module) -> Any:
    net, optimizer = peer.prepare(module, partial(_ClipsItself, lr=0.1, momentum=0.9))
    for x, y in batches():
        optimizer.zero_grad()
        peer.backward(F.mse_loss(net(x), y))
        optimizer.step()
    return net


def _array_of_gradients(peer: Peer, module: nn.Module) -> Any:
    net, optimizer = peer.prepare(module, partial(torch.optim.SGD, lr=0.1))
    arrays: list[Any] = []
    for x, y in batches():
        optimizer.zero_grad(set_to_none=False)
        peer.backward(F.mse_loss(net(x), y))
        arrays = arrays or [param.grad.numpy() for param in net.parameters()]
        for array in arrays:
            array *= 0.5
        optimizer.step()
    return net


def _traced(peer: Peer, module: nn.Module) -> Any:
    def trace(net: Any, index: int) -> None:
        with torch.no_grad():
            frozen = torch.jit.trace(getattr(net, "module", net), torch.ones(2, 8))
            assert frozen(torch.ones(1, 8)).shape == (1, 4)

    return plain(peer, module, trace)


def _assigned(peer: Peer, module: nn.Module) -> Any:
    """A lottery ticket: all weights get the memory of the first ones, which lives on."""
    kept = [param.detach().clone() for param in module.parameters()]

    def assign(net: Any, index: int) -> None:
        if index == 1:
            for param, first in zip(net.parameters(), kept, strict=True):
                param.data = first

    return plain(peer, module, assign)


def _flat_gradients(peer: Peer, module: nn.Module) -> Any:
    """Gradients are views of one tensor, which is zeroed as a whole."""
    net, optimizer = peer.prepare(module, SGD)
    params = list(net.parameters())
    flat = torch.zeros(sum(param.numel() for param in params))
    for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.grad = part.view(param.shape)
    for x, y in batches():
        flat.zero_()
        peer.backward(F.mse_loss(net(x), y))
        optimizer.step()
    return net


def _read_in_backward(peer: Peer, module: Any) -> Any:
    """What flows back into the first layer is scaled by the norm of the last one's gradient, which has come."""
    first, second = module.first, module.second

    def scale(layer: nn.Module, grads: Any) -> Any:
        grad = second.weight.grad
        return grads if grad is None else tuple(each * float(1 + grad.norm()) for each in grads)

    first.register_full_backward_pre_hook(scale)
    return plain(peer, module)


def _dropped_in_backward(peer: Peer, module: Any) -> Any:
    """In the second backward of a step a hook drops the gradient of the first layer, whose turn comes later."""
    net, optimizer = peer.prepare(module, SGD)
    first, second, calls = module.first, module.second, count(1)

    def drop(layer: nn.Module, grads: Any) -> None:
        if next(calls) % 2 == 0:
            first.weight.grad = None

    second.register_full_backward_pre_hook(drop)
    for x, y in batches():
        for _ in range(2):
            peer.backward(F.mse_loss(net(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return net


def _uneven(peer: Peer, module: nn.Module) -> Any:
    def validate(net: Any, index: int) -> None:
        with torch.no_grad():
            for x, _ in batches(3 - dist.get_rank()):
                net(x)

    return plain(peer, module, validate)


def _zeroed_at_first(peer: Peer, module: nn.Module) -> Any:
    net, optimizer = peer.prepare(module, SGD)
    for index, (x, y) in enumerate(batches(6)):
        peer.backward(F.mse_loss(net(x), y))
        optimizer.step()
        if index < 2:
            optimizer.zero_grad()
    return net


class Empty(Net):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum()


@dataclass(frozen=True)
class Kind:
    """A kind of program that is refused."""

    name: str
    #: One line for the table.
    what: str
    build: Callable[[], nn.Module]
    #: Trains the module under a peer, and returns what `Peer.weights` takes.
    train: Callable[[Peer, Any], Any]
    #: The peers of our strategies that refuse it.
    peers: tuple[str, ...]
    #: Which of our strategies train it.
    ours: str
    #: Programs of tests/programs.
    programs: tuple[str, ...]


KINDS = (
    Kind("double", "All parameters in float64", lambda: Net().double(), plain, ZERO,
         "`zeroplus_stage0`, `zeroplus_fsdp`", ("double_parameters", "double_precision", "fabric_double")),
    Kind("one_double", "A layer in float64", OneDouble, plain, ZERO,
         "`zeroplus_stage0`, `zeroplus_fsdp`", ("mixed_dtypes", "branches_of_two_dtypes")),
    Kind("complex", "A complex parameter", Complex, plain, ZERO, "`zeroplus_stage0`, `zeroplus_fsdp`",
         ("complex_parameter", "complex_layer", "complex_layer_resumes")),
    Kind("lbfgs", "LBFGS, with a closure", Net, _lbfgs, ZERO, "`zeroplus_stage0`, `zeroplus_fsdp`",
         ("lbfgs", "lbfgs_clipped", "lbfgs_with_schedule", "lbfgs_by_hand", "lbfgs_resumes", "fabric_lbfgs",
          "adam_then_lbfgs", "adam_then_lbfgs_resumes", "adam_then_lbfgs_with_schedules", "lbfgs_of_a_part",
          "fabric_adam_then_lbfgs", "mixed_lbfgs")),
    Kind("clips_itself", "An optimizer that clips by the norm of all gradients within its step", Net, _clips_itself,
         ZERO, "`zeroplus_stage0`, `zeroplus_fsdp`", ("clips_within_its_step", "estimates_from_all_gradients",
                                                    "divided_by_all_groups")),
    Kind("draws", "An optimizer that draws random numbers in its step", Net, _draws, ZERO,
         "`zeroplus_stage0`, `zeroplus_fsdp`", ("noise_in_each_step",)),
    Kind("array", "`param.grad.numpy()`, kept over steps", Net, _array_of_gradients, FSDP2,
         "`zeroplus_stage0` to `3`; a copy, everywhere", ("kept_array_of_gradients",)),
    Kind("sparse", "`nn.Embedding(sparse=True)`", Sparse, plain, (*FSDP2, *ZERO), "`zeroplus_stage0`",
         ("sparse_embedding",)),
    Kind("traced", "`torch.jit.trace` of the module in training", Net, _traced, (*FSDP2, *_ZERO_3),
         "`zeroplus_stage0` to `2`; a copy, everywhere", ("traced", "traced_as_a_whole")),
    Kind("assigned", "`param.data = tensor`, and the tensor lives on", Net, _assigned, FSDP2,
         "`zeroplus_stage0` to `3`; a clone, everywhere", ("pruning", "memory_exchanged", "memory_by_turns")),
    Kind("shared", "Two parameters with common memory, `first.data = second.data`", Shared, plain, (*FSDP2, *ZERO),
         "`zeroplus_stage0`; a shared parameter, everywhere",
         ("memory_of_another_weight", "memory_of_rows_of_a_weight", "memory_of_a_trained_weight",
          "memory_of_another_weight_in_the_fit", "memory_of_rows_in_the_fit")),
    Kind("flat_gradients", "`param.grad = flat[a:b].view_as(param)`, and `flat` is used", Net, _flat_gradients, FSDP2,
         "`zeroplus_stage0` to `3`", ("grads_in_one_tensor", "grads_in_one_tensor_each_step",
                                      "grads_assigned_then_scaled")),
    Kind("uneven", "Validation on different numbers of batches", Net, _uneven, (*FSDP2, *_ZERO_3),
         "`zeroplus_stage0` to `2`", ("uneven_validation",)),
    Kind("zeroed_at_first", "No `zero_grad()` any more after the third step", Net, _zeroed_at_first, ZERO,
         "`zeroplus_stage0`, `zeroplus_fsdp`; without any `zero_grad()`, everywhere", ("zeroed_at_first",)),
    Kind("read_in_backward", "`param.grad` of another layer, read in a hook within a backward", Three,
         _read_in_backward, (*FSDP2, *ZERO[1:]),
         "`zeroplus_stage0`, `zeroplus_stage1`; with `reduction=\"step\"`, `2`, `3`",
         ("reads_the_last_layer", "reads_the_next_layer", "reads_the_last_layer_in_a_module_hook")),
    Kind("dropped_in_backward", "`param.grad = None` for another layer, in a hook within a second backward", Three,
         _dropped_in_backward, ZERO[1:],
         "`zeroplus_stage0`, `zeroplus_stage1`, `zeroplus_fsdp`; with `reduction=\"step\"`, `2`, `3`",
         ("dropped_in_the_second_backward", "assigned_in_the_second_backward", "dropped_while_accumulating")),
    Kind("identity", "An optimizer that knows parameters by `id(param)`", Net, _by_identity, ZERO,
         "`zeroplus_stage0`, `zeroplus_fsdp`", ("optimizer_by_identity", "optimizer_by_key")),
    Kind("scripted", "A layer that `torch.jit.script` has compiled", Scripted, plain, (*FSDP2, *_ZERO_3),
         "`zeroplus_stage0` to `2`", ("scripted_layer", "scripted_network")),
    Kind("empty", "A parameter without elements", Empty, plain, (*FSDP2, *_ZERO_3),
         "`zeroplus_stage0` to `2`", ("empty_parameter",)),
)  # fmt: skip
