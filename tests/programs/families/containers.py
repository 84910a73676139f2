"""Layers that write to what they are called with, and return tensors in objects."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.base import Manual, Regression, step
from tests.programs.program import program
from tests.programs.run import Run

# -- what is returned -------------------------------------------------------------------------------------------------


@dataclass
class _Dataclass:
    hidden: Tensor
    out: Tensor


class _Object:
    def __init__(self, hidden: Tensor, out: Tensor) -> None:
        self.hidden, self.rest = hidden, [{"out": out}]

    @property
    def out(self) -> Any:
        return self.rest[0]["out"]


class _Named(NamedTuple):
    hidden: Tensor
    out: Tensor


class _Block(nn.Module):
    """Layers, and a parameter that an operation other than a linear one uses."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(16))
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        hidden = (self.a(x) * self.scale).tanh()
        return self.kind(hidden, self.b(hidden))


class _Leaf(nn.Module):
    """A parameter alone."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8) * 0.3)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(x, F.linear(x.tanh(), self.weight))


class _Returns(Regression):
    """Subclasses say what the last module returns."""

    kind: Any
    Last: type[nn.Module] = _Block

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), self.Last(self.kind))

    def loss(self, batch: Any) -> Tensor:
        first, last = self.net  # type: ignore[misc]
        got = last(first(batch[0]))
        return F.mse_loss(got.out, batch[1]) + got.hidden.square().mean()


@program()
class dataclass_returned(_Returns):
    """A module returns a dataclass."""

    kind = _Dataclass


@program(on_three_ranks=True)
class object_returned(_Returns):
    """A module returns an object with tensors, one of them in a dict in a list."""

    kind = _Object


@program()
class object_returned_by_a_leaf(_Returns):
    """A module without modules within returns such an object, with its input."""

    kind = _Object
    Last = _Leaf


@program()
class named_tuple_returned(_Returns):
    """A module returns a named tuple."""

    kind = _Named


class _Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cache = nn.Linear(8, 8), list[Tensor]()

    def forward(self, x: Tensor) -> list[Tensor]:
        self.cache.append(self.layer(x))
        return self.cache


@program()
class own_list_returned(Regression):
    """A layer returns the list in which it keeps its outputs."""

    def build(self) -> nn.Module:
        return nn.ModuleList([_Cache(), nn.Linear(8, 4)])

    def loss(self, batch: Any) -> Tensor:
        layer, last = self.net  # type: ignore[misc]
        layer.cache.clear()
        layer(layer(batch[0])[0])
        assert layer(batch[0]) is layer.cache
        return F.mse_loss(last(sum(layer.cache)), batch[1])


class _Stream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8) * 0.3)
        self.cell = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            x = self.cell(x).tanh()
            yield F.linear(x, self.weight)


@program()
class generator_returned(Regression):
    """A forward with `yield`, which runs when the caller asks for its outputs."""

    def build(self) -> nn.Module:
        return _Stream()

    def loss(self, batch: Any) -> Tensor:
        return sum(F.mse_loss(out, batch[1]) for out in self.net(batch[0]))  # type: ignore[return-value]


class _Balanced(nn.Module):
    balance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gate = nn.Parameter(torch.randn(4, 8) * 0.3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.balance = self.gate(x).square().mean() + self.weight.square().mean()
        return F.linear(x.tanh(), self.weight)


@program()
class loss_kept_by_a_layer(Regression):
    """A layer keeps a loss as an attribute, which is added to the others."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), _Balanced())

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.net[1].balance  # type: ignore[index]


# -- what is written to -----------------------------------------------------------------------------------------------


class _Bag:
    aux: Any = 0


class _Adds(nn.Module):
    """A layer that adds a loss to a container."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, losses: Any) -> Tensor:
        hidden = (self.a(x) * self.scale).tanh()
        aux = (self.b(hidden) * self.scale.sum()).square().mean()
        if isinstance(losses, list):
            losses.append(aux)
        elif isinstance(losses, dict):
            losses["aux"] = losses.get("aux", 0) + aux
        else:
            losses.aux = losses.aux + aux
        return hidden


class _Collects(Regression):
    """Subclasses say what losses are collected in, and whether it is a named argument."""

    make: Callable[[], Any] = list
    total: Callable[[Any], Any] = sum
    is_named = False

    def build(self) -> nn.Module:
        return nn.ModuleList([_Adds(), _Adds(), nn.Linear(8, 4)])

    def loss(self, batch: Any) -> Tensor:
        losses, x = type(self).make(), batch[0]
        for layer in self.net[:2]:  # type: ignore[index]
            x = layer(x, losses=losses) if self.is_named else layer(x, losses)
        return F.mse_loss(self.net[2](x), batch[1]) + 0.1 * type(self).total(losses)  # type: ignore[index]


@program(on_three_ranks=True)
class losses_in_a_list(_Collects):
    """Mixture of experts: layers append a loss to a list that they are called with."""


@program()
class losses_in_a_list_by_name(_Collects):
    """The same with a named argument."""

    is_named = True


@program()
class losses_in_a_dict(_Collects):
    """Layers add a loss to an entry of a dict."""

    make = dict
    total = staticmethod(lambda losses: losses["aux"])


@program()
class losses_in_a_dict_by_name(losses_in_a_dict):
    """The same with a named argument."""

    is_named = True


@program()
class losses_in_an_object(_Collects):
    """Layers add a loss to an attribute of an object."""

    make = _Bag
    total = staticmethod(lambda losses: losses.aux)


@program()
class losses_in_an_object_by_name(losses_in_an_object):
    """The same with a named argument."""

    is_named = True


@program()
class losses_in_other_dicts(Regression):
    """Layers add losses to a `defaultdict`, an `OrderedDict`, and a dict of a class of one's own."""

    def build(self) -> nn.Module:
        return nn.ModuleList([*(_Adds() for _ in range(3)), nn.Linear(8, 4)])

    def loss(self, batch: Any) -> Tensor:
        class Own(dict[str, Any]):
            pass

        x, found = batch[0], (defaultdict[str, Any](float), OrderedDict[str, Any](), Own())
        for layer, losses in zip(self.net[:3], found, strict=True):  # type: ignore[index]
            x = layer(x, losses)
        return F.mse_loss(self.net[3](x), batch[1]) + 0.1 * sum(each["aux"] for each in found)  # type: ignore[index]


@program()
def losses_in_a_list_validated(run: Run) -> None:
    """Lists in training, with two batches per step, and in validation."""
    run.fit(losses_in_a_list(), run.loader(), run.loader(2), max_epochs=2, accumulate_grad_batches=2)


@program()
class losses_in_a_list_by_hand(Manual):
    """Lists in two backwards per step."""

    build, loss = _Collects.build, _Collects.loss
    make: Callable[[], Any] = list
    total: Callable[[Any], Any] = sum
    is_named = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for part in zip(*(each.chunk(2) for each in batch), strict=True):
            self.manual_backward(self.loss(part))
        step(self.optimizers())


class _AddsInLinearLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        losses.append(self.b(x).float().square().mean())
        return self.a(x)  # type: ignore[no-any-return]


@program(precision="bf16-mixed", reference_precision="bf16-mixed")
class losses_in_a_list_in_mixed_precision(_Collects):
    """The same as for a list in bf16-mixed, where inputs are cast."""

    def build(self) -> nn.Module:
        return nn.ModuleList([_AddsInLinearLayers(), _AddsInLinearLayers(), nn.Linear(8, 4)])


class _Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, losses: list[Tensor], depth: int = 2) -> Tensor:
        if depth == 0:
            return self.last(x)  # type: ignore[no-any-return]
        hidden = (self.layer(x) * self.scale).tanh()
        losses.append(hidden.square().mean() * depth)
        result: Tensor = self(hidden, losses, depth - 1) + self(0.5 * x, losses, depth - 1)
        losses.append(result.square().mean())
        return result


@program()
class losses_in_a_list_of_a_module_that_calls_itself(Regression):
    """A module calls itself with the list that it was called with, and appends before and after."""

    def build(self) -> nn.Module:
        return _Recursive()

    def loss(self, batch: Any) -> Tensor:
        losses: list[Tensor] = []
        loss = F.mse_loss(self.net(batch[0], losses), batch[1])
        assert len(losses) == 6
        return loss + 0.1 * sum(losses)


class _Moves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, state: dict[str, Any]) -> None:
        state["x"] = (self.layer(state["x"]) * self.scale).tanh()


@program()
class state_through_layers(Regression):
    """Layers change the state that they are called with, and return nothing."""

    def build(self) -> nn.Module:
        return nn.ModuleList([_Moves(), _Moves(), nn.Linear(8, 4)])

    def loss(self, batch: Any) -> Tensor:
        state = {"x": batch[0]}
        for layer in self.net[:2]:  # type: ignore[index]
            layer(state)
        return F.mse_loss(self.net[2](state["x"]), batch[1])  # type: ignore[index]


class _Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, *, memory: dict[str, Any]) -> Tensor:
        hidden: Tensor = (self.layer(x) * self.scale).tanh()
        memory["states"].append(hidden)
        memory["tail"]["last"] = hidden
        memory.setdefault("new", []).append(hidden.mean())
        memory.pop("old", None)
        return hidden


@program()
class memory_of_containers(Regression):
    """Layers write to lists and dicts in a dict, make new ones, and take one away."""

    def build(self) -> nn.Module:
        return nn.ModuleList([_Remembers(), _Remembers(), nn.Linear(8, 4)])

    def loss(self, batch: Any) -> Tensor:
        memory: dict[str, Any] = {"states": [], "tail": {}, "old": batch[1]}
        x = batch[0]
        for layer in self.net[:2]:  # type: ignore[index]
            x = layer(x, memory=memory)
        assert len(memory["states"]) == len(memory["new"]) == 2 and "old" not in memory
        last = self.net[2](memory["tail"]["last"] + memory["states"][0])  # type: ignore[index]
        return F.mse_loss(last, batch[1]) + sum(memory["new"])


class _OfDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.layer(batch["x"]) * self.scale  # type: ignore[no-any-return]


@program()
class leaf_in_a_dict(Manual):
    """Adversarial training: the input is a leaf in a dict, and stays it; its gradient is read."""

    def build(self) -> nn.Module:
        return _OfDict()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, x = self.optimizers(), batch[0].clone().requires_grad_()
        given = {"x": x, "all": [x]}
        self.manual_backward(F.mse_loss(self.net(given), batch[1]))
        assert given["x"] is x and given["all"][0] is x
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self.net({"x": x.detach() + 0.1 * x.grad.sign()}), batch[1]))
        optimizer.step()
