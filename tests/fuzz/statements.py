"""The statements of a random training step: they run on one rank's batch, or, for the reference, on all ranks'."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.model import Batch, Net, penalty


class Host(Protocol):
    """What runs statements: a LightningModule on one rank, or the reference on the batches of all.

    Attributes:
        net: The network.
        batches: By rank, those that this host has.
        index: Of the batch.
        values: What :class:`Forward` has made, by name: for each rank.
        read: Numbers that the program has read.
    """

    net: Net
    batches: dict[int, Batch]
    index: int
    values: dict[str, dict[int, Tensor]]
    read: list[float]

    def differentiate(self, loss: Tensor, bare: bool, **kwargs: Any) -> None:
        """``self.manual_backward(loss, ...)``, or ``loss.backward(...)``."""

    def torch_optimizer(self) -> Any:
        """The optimizer, as ``self.optimizers()``."""

    def clip(self, limit: float, algorithm: str) -> None:
        """``self.clip_gradients(...)``."""

    def schedule(self) -> None:
        """``self.lr_schedulers().step()``."""

    def window(self, kind: str, backwards: int) -> AbstractContextManager[Any]:
        """A window of the strategy."""

    def whole(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Whole weights of ``module``, to read and write."""


@dataclass(frozen=True)
class Statement:
    """A statement, which runs in some batches."""

    #: Indices of the batches; None: all.
    at: tuple[int, ...] | None = field(default=None, kw_only=True)

    def run(self, host: Any) -> None:
        """Run, if the batch is one of those."""
        if self.at is None or host.index in self.at:
            self.act(host)

    def act(self, host: Any) -> None:
        raise NotImplementedError

    def text(self) -> str:
        raise NotImplementedError

    def lines(self) -> list[str]:
        """As Python."""
        condition = "" if self.at is None else f"if index in {set(self.at) or '()'}: "
        return [condition + self.text()]


def params_of(host: Host, module: str) -> list[nn.Parameter]:
    """The parameters of a module; of all: ````."""
    return list(host.net.get_submodule(module).parameters())


@dataclass(frozen=True)
class Trunk(Statement):
    """One forward of the trunk that several losses share."""

    name: str

    def act(self, host: Host) -> None:
        host.values[self.name] = {rank: host.net.trunk(x) for rank, (x, _) in host.batches.items()}

    def text(self) -> str:
        return f"{self.name} = net.trunk(x)"


@dataclass(frozen=True)
class Loss(Statement):
    """A loss, of a head, of one half of the batch."""

    name: str
    kind: str = "mse"
    head: int = 0
    #: Name of a :class:`Trunk`; None: a forward of its own.
    of: str | None = None
    half: int | None = None
    #: The trunk gets no gradient.
    detached: bool = False
    #: From this batch on, each rank uses another head.
    by_rank: int | None = None

    def act(self, host: Host) -> None:
        if self.of is None or self.of in host.values:
            host.values[self.name] = {rank: self._loss(host, rank, *batch) for rank, batch in host.batches.items()}

    def _loss(self, host: Host, rank: int, x: Tensor, y: Tensor) -> Tensor:
        rows = slice(None) if self.half is None else slice(self.half, None, 2)
        net: Any = host.net
        differs = self.by_rank is not None and host.index >= self.by_rank
        head = (self.head + rank + host.index) % len(net.heads) if differs else self.head
        if self.kind == "penalty":
            return penalty(net, head, x[rows])
        if self.kind == "nested":
            anchor = torch.zeros((), requires_grad=True)
            return _Nested.apply(anchor, net, head, x[rows], y[rows])
        hidden = net.trunk(x[rows]) if self.of is None else host.values[self.of][rank][rows]
        out = net.heads[head](hidden.detach() if self.detached else hidden)
        match self.kind:
            case "vector":
                return (out - y[rows]).square().mean(1)
            case "smooth":
                return F.smooth_l1_loss(out, y[rows])
            case "square":
                return out.square().mean() + out.sum() / 16
        return F.mse_loss(out, y[rows])

    def text(self) -> str:
        head = f"(({self.by_rank} <= index) * (rank + index) + {self.head}) % len(heads)"
        head = str(self.head) if self.by_rank is None else head
        hidden = self.of or "net.trunk(x)"
        rows = "" if self.half is None else f"[{self.half}::2]"
        if self.kind in ("penalty", "nested"):
            return f"{self.name} = {self.kind}(heads[{head}], x{rows})"
        return f"{self.name} = {self.kind}(net.heads[{head}]({hidden}{'.detach()' * self.detached}{rows}), y{rows})"


class _Nested(torch.autograd.Function):
    """A loss whose backward runs a nested backward for each half."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, net: Any, head: int, x: Tensor, y: Tensor) -> Tensor:
        ctx.rest = net, head, x, y
        with torch.no_grad():
            return F.mse_loss(net.heads[head](net.trunk(x)), y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        net, head, x, y = ctx.rest
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            with torch.enable_grad():
                loss = F.mse_loss(net.heads[head](net.trunk(part)), target) / 2
            torch.autograd.backward(loss, grads[0])
        return torch.zeros(()), None, None, None, None


@dataclass(frozen=True)
class Backward(Statement):
    """A backward of a loss that is there."""

    name: str
    retain: bool = False
    bare: bool = False

    def act(self, host: Host) -> None:
        for loss in host.values.get(self.name, {}).values():
            kwargs: dict[str, Any] = {"retain_graph": True} if self.retain else {}
            if loss.dim():
                kwargs["gradient"] = torch.linspace(0.1, 0.4, len(loss))
            if loss.requires_grad:
                host.differentiate(loss, self.bare, **kwargs)

    def text(self) -> str:
        call = f"{self.name}.backward(" if self.bare else f"self.manual_backward({self.name}, "
        return call + "retain_graph=True" * self.retain + ")"


@dataclass(frozen=True)
class Statistic(Statement):
    """``torch.autograd.grad``, which is no backward."""

    def act(self, host: Host) -> None:
        param = host.net.get_parameter("layers.0.bias")
        total = torch.zeros(())
        for x, _ in host.batches.values():
            total += torch.autograd.grad(host.net(x).square().mean(), param)[0].norm()
        assert bool(total.isfinite())

    def text(self) -> str:
        return "torch.autograd.grad(net(x).square().mean(), net.layers[0].bias)"


@dataclass(frozen=True)
class Window(Statement):
    """Statements within a window: ``coalesce``, ``backwards``, ``max_bytes``, or ``no_sync``."""

    kind: str
    body: tuple[Statement, ...]

    def act(self, host: Host) -> None:
        backwards = [each for each in self.body if isinstance(each, Backward)]
        with host.window(self.kind, sum(each.at is None or host.index in each.at for each in backwards)):
            for statement in self.body:
                statement.run(host)

    def lines(self) -> list[str]:
        opened = {
            "coalesce": "coalesce()",
            "backwards": "coalesce(backwards=...)",
            "max_bytes": "coalesce(max_bytes=300)",
            "no_sync": "block_backward_sync()",
        }[self.kind]
        inner = [f"    {line}" for statement in self.body for line in statement.lines()]
        head = "" if self.at is None else f"if index in {set(self.at) or '()'}: "
        return [f"{head}with strategy.{opened}:", *inner]


@dataclass(frozen=True)
class Step(Statement):
    """``optimizer.step()``."""

    def act(self, host: Host) -> None:
        host.torch_optimizer().step()

    def text(self) -> str:
        return "optimizer.step()"


@dataclass(frozen=True)
class Schedule(Statement):
    """``lr_schedulers().step()``."""

    def act(self, host: Host) -> None:
        host.schedule()

    def text(self) -> str:
        return "self.lr_schedulers().step()"


@dataclass(frozen=True)
class Rate(Statement):
    """A learning rate, set by hand."""

    factor: float

    def act(self, host: Host) -> None:
        for group in host.torch_optimizer().param_groups:
            group["lr"] = group["lr"] * self.factor

    def text(self) -> str:
        return f"for group in optimizer.param_groups: group['lr'] *= {self.factor}"


@dataclass(frozen=True)
class Zero(Statement):
    """A way to zero all gradients, or those of a module."""

    how: str = "optimizer"
    module: str = ""

    def act(self, host: Host) -> None:
        match self.how:
            case "optimizer":
                host.torch_optimizer().zero_grad()
            case "in place":
                host.torch_optimizer().zero_grad(set_to_none=False)
            case "module":
                host.net.get_submodule(self.module).zero_grad()
            case "children":
                for child in host.net.children():
                    child.zero_grad()
            case "none":
                for param in params_of(host, self.module):
                    param.grad = None

    def text(self) -> str:
        name = f"net.{self.module}" if self.module else "net"
        return {
            "optimizer": "optimizer.zero_grad()",
            "in place": "optimizer.zero_grad(set_to_none=False)",
            "module": f"{name}.zero_grad()",
            "children": "for child in net.children(): child.zero_grad()",
            "none": f"for p in {name}.parameters(): p.grad = None",
        }[self.how]


@dataclass(frozen=True)
class Clip(Statement):
    """Clipping by Lightning's method, or by torch's function."""

    limit: float
    algorithm: str = "norm"
    by_torch: bool = False

    def act(self, host: Host) -> None:
        if all(param.grad is None for param in host.net.parameters()):
            return  # torch's function for values fails then
        if not self.by_torch:
            host.clip(self.limit, self.algorithm)
        elif self.algorithm == "norm":
            host.read.append(float(torch.nn.utils.clip_grad_norm_(host.net.parameters(), self.limit)))
        else:
            torch.nn.utils.clip_grad_value_(host.net.parameters(), self.limit)

    def text(self) -> str:
        if self.by_torch:
            return f"torch.nn.utils.clip_grad_{self.algorithm}_(net.parameters(), {self.limit})"
        return f"self.clip_gradients(optimizer, {self.limit}, {self.algorithm!r})"
