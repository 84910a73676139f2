"""Small random networks, described by data, and the batches that train them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 5
ROWS = 4
Batch = tuple[Tensor, Tensor]

#: What a layer of the trunk may be. ``twice`` runs a layer two times; ``tied`` has the weight of the first layer;
#: ``idle`` belongs to the network, and no loss uses it.
KINDS = ("linear", "norm", "batchnorm", "gate", "vector", "twice", "tied", "idle")


@dataclass(frozen=True)
class Layer:
    """A layer of the trunk."""

    kind: str
    #: None, ``reentrant`` or ``plain``: whether its activations are recomputed in the backward.
    recomputed: str | None = None
    #: Whether it is frozen when the network is made.
    frozen: bool = False

    def __str__(self) -> str:
        words = [self.kind, f"recomputed ({self.recomputed})" if self.recomputed else "", "frozen" * self.frozen]
        return ", ".join(word for word in words if word)


@dataclass(frozen=True)
class Model:
    """A trunk of layers, the first of which is linear, and heads that losses choose from."""

    seed: int
    layers: tuple[Layer, ...]
    heads: int
    #: Scales the gradient of the first weight in a hook that is set before the fit.
    hook: bool = False

    def __str__(self) -> str:
        lines = [f"  layers.{index}: {layer}" for index, layer in enumerate(self.layers)]
        lines.append(f"  heads.0 to heads.{self.heads - 1}: linear")
        if self.hook:
            lines.append("  layers.0.weight.register_hook(lambda grad: 0.5 * grad)")
        return "\n".join(lines)

    def names(self) -> list[str]:
        """The modules that statements may be about."""
        return [f"layers.{i}" for i in range(len(self.layers))] + [f"heads.{i}" for i in range(self.heads)]


class Gate(nn.Module):
    """Multiplies by a parameter: without dimensions, or a vector."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Net(nn.Module):
    """What a :class:`Model` describes. ``h = trunk(x)``, then ``heads[i](h)``."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.layers = nn.ModuleList(_make(layer.kind) for layer in model.layers)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(model.heads))
        generator = torch.Generator().manual_seed(model.seed)
        with torch.no_grad():
            for param in self.parameters():
                param.add_(torch.rand(param.shape, generator=generator), alpha=0.4).sub_(0.1)
        for layer, made in zip(model.layers, self.layers, strict=True):
            if layer.kind == "tied":
                made.weight = self.layers[0].weight
            made.requires_grad_(not layer.frozen)
        if model.hook:
            self.layers[0].weight.register_hook(lambda grad: 0.5 * grad)  # type: ignore[operator, union-attr]

    def trunk(self, x: Tensor) -> Tensor:
        for layer, made in zip(self.model.layers, self.layers, strict=True):
            if layer.kind == "idle":
                continue
            for _ in range(2 if layer.kind == "twice" else 1):
                if layer.recomputed and torch.is_grad_enabled():
                    x = checkpoint(_apply, made, x, use_reentrant=layer.recomputed == "reentrant")
                else:
                    x = _apply(made, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[0](self.trunk(x))


def _apply(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(layer(x))


def _make(kind: str) -> nn.Module:
    match kind:
        case "norm":
            return nn.LayerNorm(WIDTH)
        case "batchnorm":
            return nn.BatchNorm1d(WIDTH)
        case "gate":
            return Gate(())
        case "vector":
            return Gate((WIDTH,))
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


def batches(seed: int, count: int, world_size: int) -> list[list[Batch]]:
    """``count`` batches for every rank: inputs ``(ROWS, WIDTH)``, targets ``(ROWS, 3)``."""
    generator = torch.Generator().manual_seed(seed)

    def draw(width: int) -> Tensor:
        return torch.randn(ROWS, width, generator=generator)

    return [[(draw(WIDTH), draw(3)) for _ in range(world_size)] for _ in range(count)]


def penalty(net: Any, head: int, x: Tensor) -> Tensor:
    """A gradient penalty: it is differentiated twice, ``()``."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(net.heads[head](net.trunk(x)).square().sum(), x, create_graph=True)
    return grad.square().sum(1).mean()
