"""Weights and buffers that have the same memory, and weights that exchange it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat, nn

from tests.programs.base import Regression
from tests.programs.program import Refusal, program

_SHARDED = ("stage1*", "stage2*", "stage3*", "fsdp*")
_AT_SETUP = dict.fromkeys(_SHARDED, Refusal("MisconfigurationException", "have the same memory"))
_OF_FSDP = Refusal("RuntimeError", "others have the tensor's memory")
_AT_THE_STEP = {"fsdp*": _OF_FSDP, **dict.fromkeys(_SHARDED[:3], Refusal("RuntimeError", "have the same memory since"))}


class _Squares(Regression):
    def build(self) -> Any:
        layers = (nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
        net = nn.Sequential(*layers)
        self.share(net)
        return net

    def share(self, net: Any) -> None:
        """Let weights have common memory, before the fit."""


@program(refused=_AT_SETUP)
class memory_of_another_weight(_Squares):
    """`first.weight.data = second.weight.data` before the fit: an update of one changes the other."""

    def share(self, net: Any) -> None:
        net[0].weight.data = net[2].weight.data


@program(refused=_AT_SETUP)
class memory_of_rows_of_a_weight(_Squares):
    """A weight is the first rows of another."""

    def share(self, net: Any) -> None:
        net[5].weight.data = net[2].weight.data[:4]


@program(refused=_AT_SETUP)
class memory_of_a_trained_weight(_Squares):
    """A frozen weight has the memory of one that is trained."""

    def share(self, net: Any) -> None:
        net[0].weight.data = net[2].weight.data
        net[0].requires_grad_(False)


@program()
class memory_of_a_frozen_weight(_Squares):
    """Two frozen weights have the same memory."""

    def share(self, net: Any) -> None:
        net[0].weight.data = net[2].weight.data
        net[0].requires_grad_(False)
        net[2].requires_grad_(False)


@program()
class columns_of_one_tensor(_Squares):
    """Two weights are columns of one tensor, and have no element in common."""

    def share(self, net: Any) -> None:
        both = cat([net[0].weight.data, net[2].weight.data], 1)
        net[0].weight.data, net[2].weight.data = both[:, :8], both[:, 8:]


@program(on_three_ranks=True)
class buffer_of_a_weight(_Squares):
    """A buffer has the memory of a weight, and is used in the loss: `register_buffer("same", layer.weight.data)`."""

    def share(self, net: Any) -> None:
        net.register_buffer("same", net[2].weight.data)

    def loss(self, batch: Any) -> Tensor:
        same: Any = self.net.same
        self.log("same", same.sum())
        return super().loss(batch) + 0.1 * same.square().mean()


@program(refused=_AT_THE_STEP)
class memory_of_another_weight_in_the_fit(_Squares):
    """`first.weight.data = second.weight.data` when the fit begins."""

    def on_fit_start(self) -> None:
        net: Any = self.net
        net[0].weight.data = net[2].weight.data


@program(refused=_AT_THE_STEP)
class memory_of_rows_in_the_fit(_Squares):
    """A weight becomes the first rows of another after a batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        net: Any = self.net
        if batch_idx == 1:
            net[5].weight.data = net[2].weight.data[:4]


@program(refused={"fsdp*": _OF_FSDP}, on_three_ranks=True)
class memory_exchanged(_Squares):
    """Two weights exchange their memory: `first.data, second.data = second.data, first.data`."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        net: Any = self.net
        if batch_idx == 1:
            net[0].weight.data, net[2].weight.data = net[2].weight.data, net[0].weight.data


@program(refused={"fsdp*": _OF_FSDP})
class memory_by_turns(_Squares):
    """Three weights take turns with their memory, before each batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        first, second, third = (layer.weight for layer in (self.net[0], self.net[2], self.net[4]))  # type: ignore[index]
        first.data, second.data, third.data = second.data, third.data, first.data  # type: ignore[union-attr]
