"""Training steps, as users write them, for the gradient matrix. Each calls ``backward`` as ``manual_backward``.

Weights and data are a few small integers, every function is piecewise polynomial and every mean divides by a power of
two, so that the gradients of the first step are exact in fp32: every order of additions must give the same bits.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from lightning_zeroplus.testing.reference import Backward, Pattern

CHUNKS = 4
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """A trunk with a frozen layer, a head, and two heads that only some backwards use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.head, self.sometimes, self.late = nn.Linear(12, 4), nn.Linear(12, 4), nn.Linear(12, 4)
        _set_small_integers(self)

    def trunk(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        return self.frozen(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


class TiedNet(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.second.weight = self.first.weight
        _set_small_integers(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))))


@torch.no_grad()
def _set_small_integers(module: nn.Module) -> None:
    # Three entries of 1 or -1 in each row of a weight: activations stay below 3 ** depth, gradients below 2 ** 24.
    generator = torch.Generator().manual_seed(0)
    for param in module.parameters():
        keep = torch.rand(param.shape, generator=generator).argsort(-1) < 3
        param.copy_(keep * (2 * torch.randint(0, 2, param.shape, generator=generator) - 1))


def batches(count: int, world_size: int = 2, rows: int = 8) -> list[list[Batch]]:
    """``count`` batches for every rank: ``(rows, 8)`` inputs and ``(rows, 4)`` targets from -2 to 2."""
    generator = torch.Generator().manual_seed(1)

    def draw(width: int) -> Tensor:
        return torch.randint(-2, 3, (rows, width), generator=generator).float()

    return [[(draw(8), draw(4)) for _ in range(world_size)] for _ in range(count)]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target.float()).square().mean() / 128  # a small curvature keeps lr = 1/8 stable


def _chunks(batch: Batch) -> list[Batch]:
    return list(zip(batch[0].chunk(CHUNKS), batch[1].chunk(CHUNKS), strict=True))


def single(net: nn.Module, batch: Batch, backward: Backward, index: int) -> None:
    """One backward."""
    backward(_loss(net(batch[0]), batch[1]))


def several(net: nn.Module, batch: Batch, backward: Backward, index: int) -> None:
    """One backward per chunk: finding number one."""
    for x, y in _chunks(batch):
        backward(_loss(net(x), y) / CHUNKS)


def shared_forward(net: Any, batch: Batch, backward: Backward, index: int) -> None:
    """Three losses over one forward, on a retained graph."""
    hidden = net.trunk(batch[0])
    backward(_loss(net.head(hidden), batch[1]), retain_graph=True)
    backward(_loss(net.sometimes(hidden), batch[1]), retain_graph=True)
    backward(hidden.float().sum() / 4096)


def same_loss_twice(net: nn.Module, batch: Batch, backward: Backward, index: int) -> None:
    """The very same graph, walked twice."""
    loss = _loss(net(batch[0]), batch[1])
    backward(loss, retain_graph=True)
    backward(loss)


def unused(net: Any, batch: Batch, backward: Backward, index: int) -> None:
    """``sometimes`` is used in one backward of each step, ``late`` not before the second step, and once only."""
    for number, (x, y) in enumerate(_chunks(batch)):
        hidden = net.trunk(x)
        loss = _loss(net.head(hidden), y) / CHUNKS
        if number == 1:
            loss = loss + _loss(net.sometimes(hidden), y)
        if index == 1 and number == 2:
            loss = loss + _loss(net.late(hidden), y)
        backward(loss)


def late_once(net: Any, batch: Batch, backward: Backward, index: int) -> None:
    """One backward; ``late`` takes part in the second step only, with a large gradient."""
    hidden = net.trunk(batch[0])
    loss = _loss(net.head(hidden), batch[1])
    backward(loss + 16 * _loss(net.late(hidden), batch[1]) if index == 1 else loss)


def idle(net: nn.Module, batch: Batch, backward: Backward, index: int) -> None:
    """Backwards that reach no parameter, before and after one that does."""
    backward(batch[0].clone().requires_grad_().float().sum())
    single(net, batch, backward, index)
    backward(batch[0].clone().requires_grad_().float().sum())


class _PlannedError(Exception):
    pass


def _failing_backward(net: Any, batch: Batch, backward: Backward) -> None:
    """Reach the head, then fail."""
    hidden = net.trunk(batch[0])

    def fail(grad: Tensor) -> None:
        raise _PlannedError

    hidden.register_hook(fail)
    with contextlib.suppress(_PlannedError):
        backward(_loss(net.head(hidden), batch[1]))


def interrupted(net: Any, batch: Batch, backward: Backward, index: int) -> None:
    """A backward that fails half-way, is caught, and is followed by another: what the first has reached, counts."""
    _failing_backward(net, batch, backward)
    single(net, batch, backward, index)


def interrupted_last(net: Any, batch: Batch, backward: Backward, index: int) -> None:
    """The failing backward is the last before the step."""
    single(net, batch, backward, index)
    _failing_backward(net, batch, backward)


class _RunsBackwards(Function):
    """The loss of a network, whose backward runs nested backwards over chunks."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, net: nn.Module, batch: Batch) -> Tensor:
        ctx.net, ctx.batch = net, batch
        with torch.no_grad():
            return sum((_loss(net(x), y) / CHUNKS for x, y in _chunks(batch)), torch.zeros(()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        for x, y in _chunks(ctx.batch):
            with torch.enable_grad():
                loss = _loss(ctx.net(x), y) / CHUNKS
            torch.autograd.backward(loss, grads[0])
        return torch.zeros(()), None, None


def nested(net: nn.Module, batch: Batch, backward: Backward, index: int) -> None:
    """A nested backward per chunk, beside an ordinary use of the same parameters."""
    anchor = torch.zeros((), requires_grad=True)
    backward(_RunsBackwards.apply(anchor, net, batch) + _loss(net(batch[0]), batch[1]))


def leaf_hook(net: nn.Module, batch: Batch, backward: Backward, index: int) -> None:
    """A leaf whose hook runs the backwards, as sentence-transformers' cached losses return."""
    with torch.no_grad():
        loss = _loss(net(batch[0]), batch[1])
    loss = loss.detach().requires_grad_()

    def hook(grad: Tensor) -> None:
        with torch.enable_grad():
            for x, y in _chunks(batch):
                (_loss(net(x), y) / CHUNKS * grad).backward()

    loss.register_hook(hook)
    backward(loss)


def checkpointed(net: Any, batch: Batch, backward: Backward, index: int) -> None:
    """One layer in two reentrant checkpoints, and in a non-reentrant one."""

    def layer(hidden: Tensor) -> Tensor:
        return torch.relu(net.second(hidden))

    hidden = torch.relu(net.first(batch[0]))
    for _ in range(2):
        hidden = checkpoint(layer, hidden, use_reentrant=True)
    backward(_loss(net.head(hidden), batch[1]))
    hidden = checkpoint(layer, torch.relu(net.first(batch[0])), use_reentrant=False)
    backward(_loss(net.head(hidden), batch[1]))


def cached(net: Any, batch: Batch, backward: Backward, index: int) -> None:
    """GradCache by hand: outputs without a graph, their gradient, one surrogate per chunk."""
    with torch.no_grad():
        outputs = torch.cat([net(x) for x, _ in _chunks(batch)])
    outputs = outputs.float().requires_grad_()
    (grad,) = torch.autograd.grad(_loss(outputs, batch[1]), outputs)
    for (x, _), part in zip(_chunks(batch), grad.chunk(CHUNKS), strict=True):
        backward((net(x).float() * part).sum())


def tied(net: nn.Module, batch: Batch, backward: Backward, index: int) -> None:
    """Several backwards through a weight that two layers share."""
    several(net, batch, backward, index)


def direct(net: nn.Module, batch: Batch, backward: Backward, index: int) -> None:
    """Plain ``loss.backward()`` in the user's loop; the matrix passes a ``backward`` that does just that."""
    several(net, batch, backward, index)


PATTERNS: dict[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (
        single,
        several,
        shared_forward,
        same_loss_twice,
        unused,
        late_once,
        idle,
        interrupted,
        interrupted_last,
        nested,
        leaf_hook,
        checkpointed,
        cached,
        tied,
        direct,
    )
}


#: Backwards of each pattern; nested ones count as one.
BACKWARDS = {
    "single": 1,
    "several": 4,
    "shared_forward": 3,
    "same_loss_twice": 2,
    "unused": 4,
    "late_once": 1,
    "idle": 3,
    "interrupted": 2,
    "interrupted_last": 2,
    "nested": 1,
    "leaf_hook": 1,
    "checkpointed": 2,
    "cached": 4,
    "tied": 4,
    "direct": 4,
}


def build(pattern: str) -> nn.Module:
    """The network that ``pattern`` trains, always with the same weights."""
    return TiedNet() if pattern == "tied" else Net()
