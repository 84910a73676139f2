"""Statements that touch gradients, weights and ``requires_grad`` by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.fuzz.statements import Host, Statement, params_of


@dataclass(frozen=True)
class Edit(Statement):
    """What is done to ``param.grad`` of a module."""

    how: str
    module: str = ""

    def act(self, host: Host) -> None:
        generator = torch.Generator().manual_seed(host.index)
        for param in params_of(host, self.module):
            if param.grad is None:
                host.read.append(-1.0)
            elif self.how == "read":
                host.read.append(float(param.grad.norm()))
            else:
                self._edit(param, generator)

    def _edit(self, param: Any, generator: torch.Generator) -> None:
        match self.how:
            case "scale":
                param.grad.mul_(0.5)
            case "assign":
                param.grad = param.grad.clone() * 0.5 + 0.01
            case "noise":
                param.grad.add_(torch.randn(param.grad.shape, generator=generator), alpha=0.05)
            case "center":
                param.grad -= param.grad.mean()
            case "data":
                param.grad.data.clamp_(-0.02, 0.02)
            case "none":
                param.grad = None

    def text(self) -> str:
        what = {
            "read": "read(p.grad.norm())",
            "scale": "p.grad.mul_(0.5)",
            "assign": "p.grad = p.grad.clone() * 0.5 + 0.01",
            "noise": "p.grad.add_(noise, alpha=0.05)",
            "center": "p.grad -= p.grad.mean()",
            "data": "p.grad.data.clamp_(-0.02, 0.02)",
            "none": "p.grad = None",
        }[self.how]
        return f"for p in net{'.' * bool(self.module)}{self.module}.parameters(): {what}"


@dataclass(frozen=True)
class Write(Statement):
    """What is written to the weights of a module."""

    how: str
    module: str = ""

    def act(self, host: Host) -> None:
        module = host.net.get_submodule(self.module)
        with host.whole(module):
            if self.how == "load":
                # A BatchNorm counts its batches, which all ranks' are in the reference.
                names = dict(module.named_parameters(remove_duplicate=False))
                module.load_state_dict({n: v * 0.9 for n, v in module.state_dict().items() if n in names}, strict=False)
            for param in self._written(module):
                self._write(param)

    def _written(self, module: nn.Module) -> Iterator[nn.Parameter]:
        yield from module.parameters() if self.how != "load" else ()

    def _write(self, param: nn.Parameter) -> None:
        match self.how:
            case "in place":
                with torch.no_grad():
                    param.mul_(0.9)
            case "data":
                param.data.clamp_(-0.3, 0.3)
            case "assign":
                param.data = param.data * 0.9
            case "init":
                torch.nn.init.constant_(param, 0.1)

    def text(self) -> str:
        name = f"net.{self.module}" if self.module else "net"
        if self.how == "load":
            return f"{name}.load_state_dict({{n: 0.9 * v for n, v in {name}.state_dict().items()}})"
        what = {
            "in place": "p.mul_(0.9)",
            "data": "p.data.clamp_(-0.3, 0.3)",
            "assign": "p.data = p.data * 0.9",
            "init": "torch.nn.init.constant_(p, 0.1)",
        }[self.how]
        return f"for p in {name}.parameters(): {what}"


@dataclass(frozen=True)
class Freeze(Statement):
    """``requires_grad_``."""

    module: str
    trainable: bool

    def act(self, host: Host) -> None:
        host.net.get_submodule(self.module).requires_grad_(self.trainable)

    def text(self) -> str:
        return f"net.{self.module}.requires_grad_({self.trainable})"
