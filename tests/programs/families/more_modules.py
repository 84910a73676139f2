"""Parameters and buffers of every kind, and where they live."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.base import Regression, trains
from tests.programs.program import program
from tests.programs.refusals import COMPLEX, FLOAT64
from tests.programs.run import Run

_trains = partial(trains, __name__)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.tensor(0.5)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x) + self.scale.square()


_trains(
    "zero_dimensional",
    "A parameter of no dimensions: a learned scale.",
    _Scaled,
    on_three_ranks=True,
)


class _List(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 4) for _ in range(3)])
        self.by_name = nn.ParameterDict(
            {"shift": nn.Parameter(torch.zeros(8)), "head": nn.Parameter(torch.randn(4, 8))}
        )

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return F.linear(x + self.by_name["shift"], self.by_name["head"])


_trains("parameter_list", "Parameters in a ParameterList and a ParameterDict.", _List)


class _Nested(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.here = nn.Linear(8, 8)
        self.below = _Nested(depth - 1) if depth else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.below(torch.tanh(self.here(x))) + x


_trains(
    "nested", "Modules in modules in modules.", lambda: nn.Sequential(_Nested(), nn.Linear(8, 4)), on_three_ranks=True
)


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([self.block, nn.Linear(8, 8), self.block])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


_trains("shared_module", "One module at three places of a network.", _Shared)


class _Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 301), nn.Linear(301, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.relu(self.wide(x)))


_trains("larger_than_a_bucket", "Odd sizes, larger than a reduction bucket.", _Large, on_three_ranks=True)


class _Codebook(nn.Module):
    """A codebook that is no parameter: its entries follow what falls on them."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(5, 4, generator=torch.Generator().manual_seed(2)))
        self.register_buffer("uses", torch.zeros(5, dtype=torch.long))
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(x) * self.mask
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        if self.training:
            self.uses += torch.bincount(nearest, minlength=5)
            self.codes.index_add_(0, nearest, 0.1 * (x.detach() - self.codes[nearest]))
        return self.decode(x + (self.codes[nearest] - x).detach())


_trains("codebook", "VQ-VAE: buffers that the forward writes, of floating point and integers.", _Codebook)


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spectral, self.head = nn.Parameter(torch.randn(5, 5, dtype=torch.cfloat) / 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(x) @ self.spectral, n=8))


class _ComplexLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.spectral = nn.Parameter(torch.ones(8)), nn.Linear(5, 5, dtype=torch.cfloat)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.irfft(self.spectral(torch.fft.rfft(x * self.scale)), n=8))


_NOT_IN_PARTITIONS = {"stage[123]*": COMPLEX}
_trains("complex_parameter", "FNO: a complex parameter.", _Complex, refused=_NOT_IN_PARTITIONS)
_trains("complex_layer", "FNO: a complex layer in a real module.", _ComplexLayer, refused=_NOT_IN_PARTITIONS)


@program(refused=_NOT_IN_PARTITIONS)
def complex_layer_resumes(run: Run) -> None:
    """A complex layer with Adam and clipping is saved, and goes on."""

    class WithAdam(Regression):
        def build(self) -> nn.Module:
            torch.manual_seed(3)
            return _ComplexLayer()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    path = str(run.folder / "checkpoint")
    clipped = {"gradient_clip_val": 0.05}
    first = run.trainer(max_epochs=1, **clipped)
    first.fit(WithAdam(), run.loader())
    first.save_checkpoint(path)
    run.fit(WithAdam(), run.loader(), max_epochs=2, ckpt_path=path, **clipped)


class _Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("freqs_cis", torch.polar(torch.ones(4), torch.arange(4.0) / 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.view_as_complex(self.first(x).view(-1, 4, 2)) * self.freqs_cis
        return self.head(torch.view_as_real(x).flatten(1))


_trains("complex_buffer", "RoPE: a complex buffer `freqs_cis`.", _Rotary)


class _Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8).double(), nn.Linear(8, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.double()))).float()


_trains(
    "double_parameters",
    "All parameters in float64, in precision 32-true.",
    _Double,
    bound=1e-9,
    refused={"stage[123]*": FLOAT64},
)


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4).double()
        self.register_buffer("shift", torch.tensor(1.0 / 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).double() + self.shift).float()


_trains("mixed_dtypes", "A layer in float32, one in float64.", _Mixed, refused={"stage[123]*": FLOAT64})


class _DoubleBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("third", torch.tensor(1.0 / 3, dtype=torch.float64))
        self.register_buffer("sum", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.sum += self.third
        return self.linear(x) * self.sum.float()


_trains("double_buffer", "A float64 buffer that accumulates, in precision 32-true.", _DoubleBuffer)


class _WithHooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.last.register_forward_hook(lambda module, args, out: out + 0.5 * args[0].mean())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


_trains("forward_hooks", "Forward hooks and pre-hooks that change what flows.", _WithHooks)


class _Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.first(x))
        return {"out": self.last(hidden), "more": (hidden, None, [hidden.mean()])}


@program()
class structured_outputs(Regression):
    """A network that returns a dictionary of tuples, lists and None."""

    def build(self) -> nn.Module:
        return _Outputs()

    def loss(self, batch: Any) -> Tensor:
        outputs = self.net(batch[0])
        return F.mse_loss(outputs["out"], batch[1]) + outputs["more"][2][0].square()


class _Late(Regression):
    """The network is made in `configure_model`."""

    def build(self) -> nn.Module:
        return nn.Identity()

    def configure_model(self) -> None:
        torch.manual_seed(0)
        if isinstance(self.net, nn.Identity):
            self.net = self.build_late()

    def build_late(self) -> nn.Module:
        raise NotImplementedError


@program(on_three_ranks=True)
class configure_model(_Late):
    """The network is built in `configure_model`, with BatchNorm."""

    def build_late(self) -> nn.Module:
        first = nn.Linear(8, 8, bias=False)
        torch.manual_seed(1)  # on a GPU the second draw of a seed is not the CPU's
        return nn.Sequential(first, nn.BatchNorm1d(8), nn.Linear(8, 4, bias=False))


@program()
class assigned_in_configure_model(_Late):
    """`configure_model` assigns `weight.data`: of the same shape, unread, and of another, as resized embeddings do."""

    def build_late(self) -> nn.Module:
        first, last = nn.Linear(8, 6), nn.Linear(6, 4)
        # A device has random numbers of its own, so nothing is left of them.
        first.weight.data = torch.linspace(-1, 1, 48).view(6, 8).cos()
        first.bias.data = torch.linspace(-1, 1, 6)
        wider = torch.linspace(-1, 1, 32).view(4, 8).sin()
        wider[:, :6] = last.weight.data.fill_(0.1)
        last.weight.data = wider
        last.bias.data.zero_()
        last.in_features = 8
        return nn.Sequential(first, nn.Tanh(), last)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.net[0](x))  # type: ignore[index]
        return self.net[2](torch.cat([hidden, x[:, :2]], 1))  # type: ignore[index]


@program()
class several_networks(Regression):
    """Four networks side by side in the LightningModule, used in another order than they are made."""

    def build(self) -> nn.Module:
        self.c, self.b, self.a = nn.Linear(8, 4), nn.Linear(8, 8), nn.Linear(8, 8)
        return nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.a(x)) + torch.tanh(self.b(self.net(x))))


@program()
class used_twice_in_a_step(Regression):
    """One network called three times in a step, once without gradients."""

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self(batch[0].flip(0))
        return F.mse_loss(self(batch[0]), batch[1]) + 0.1 * F.mse_loss(self(2 * batch[0]), target)


class _Frozen(Regression):
    """The first parameters are frozen, and of dtypes that none of the others has."""

    def build(self) -> nn.Module:
        self.order = nn.Parameter(torch.tensor([3, 1, 0, 2, 7, 6, 5, 4]), requires_grad=False)
        self.frozen = nn.Linear(8, 8).double().requires_grad_(False)
        return super().build()

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, self.order]
        return self.net(x + self.frozen(x.to(self.frozen.weight.dtype)).to(x.dtype))


@program()
class frozen_dtypes_first(_Frozen):
    """The first parameters of module and optimizer are frozen integers and a frozen layer in float64."""


@program(precision="16-mixed")
class low_frozen_dtypes_first(_Frozen):
    """The same in 16-mixed: there is a loss scale all the same."""


@program(precision="bf16-true")
class low_frozen_dtypes_first_in_bf16(_Frozen):
    """The same in bf16-true."""


class _Assigns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("first", torch.zeros(8), persistent=False)
        self.register_buffer("scale", torch.full((8,), 0.5, dtype=torch.float16))
        self.register_buffer("spread", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.count = self.count + 1
        self.first = x.detach()[0].clone()
        if self.spread is None:
            self.spread = x.detach().std(0)
            self.register_buffer("late", x.detach().amax(0))
        return self.linear((x - self.mean) / self.spread) * self.scale.float() + self.late  # type: ignore[operator]


@program({"max_epochs": 2})
class buffers_assigned(Regression):
    """Buffers are assigned in forward(), not written; one is None at first, and one is registered by a batch."""

    def build(self) -> nn.Module:
        return nn.Sequential(_Assigns(), nn.Linear(8, 4))
