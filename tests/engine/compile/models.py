"""Models with frames that Dynamo compiles and frames that it skips."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

WIDTH = 24
CLASSES = 5


class Compiled(nn.Module):
    """A frame without anything in the way."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.a(x))


class Loop(nn.Module):
    """A graph break within a loop: Dynamo skips the frame, and runs the layers in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            torch._dynamo.graph_break()
        return x


class Raw(nn.Module):
    """A parameter that is used as it is, transposed, and reshaped, in a skipped frame."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x + (x @ self.weight.t()) * self.scale.view(1, -1)
        return x


class Disabled(nn.Module):
    """``torch.compiler.disable``: the frame and all below it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Compiled()

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Conditional(nn.Module):
    """A branch on a value, which breaks the graph: both sides of the break are compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        if x.sum().item() > -1e6:
            x = x + self.b(x)
        return x


class Raising(nn.Module):
    """An exception that is caught in the frame."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1):
            try:
                torch._dynamo.graph_break()
                raise ValueError("planned")
            except ValueError:
                x = x + self.a(x)
        return x


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x + torch.tanh(x @ weight + bias)


class Arguments(nn.Module):
    """A function that gets parameters as arguments: one compiled frame, which is called with different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.1 for _ in range(2))
        self.biases = nn.ParameterList(torch.zeros(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.weights, self.biases, strict=True):
            torch._dynamo.graph_break()
            x = _affine(x, weight, bias)
        return x


BLOCKS: dict[str, type[nn.Module]] = {
    "compiled": Compiled,
    "loop": Loop,
    "raw": Raw,
    "disabled": Disabled,
    "conditional": Conditional,
    "raising": Raising,
    "arguments": Arguments,
}


class Spec(NamedTuple):
    """
    blocks: Names in ``BLOCKS``, from input to output; "again" is the block before once more, "first" the first one.
    frozen: Indices of blocks whose parameters are frozen.
    root_breaks: Whether the root's own frame is skipped.
    """

    blocks: tuple[str, ...]
    frozen: tuple[int, ...] = ()
    root_breaks: bool = False


class Net(nn.Module):
    """Blocks, one after the other, and a loss."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.order: list[int] = []
        self.root_breaks = spec.root_breaks
        for name in spec.blocks:
            if name in BLOCKS:
                self.blocks.append(BLOCKS[name]())
            at = 0 if name == "first" else len(self.blocks) - 1
            self.order.append(at)
        for index in spec.frozen:
            self.blocks[index % len(self.blocks)].requires_grad_(False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for at in self.order:
            x = self.blocks[at](x)
            if self.root_breaks:
                torch._dynamo.graph_break()
        return nn.functional.cross_entropy(self.head(x), y)


def build(spec: Spec) -> Net:
    """The same weights every time."""
    torch.manual_seed(0)
    return Net(spec)


def batch(step: int, rank: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    """Inputs of shape ``(rows, WIDTH)`` and labels of shape ``(rows,)``."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)
