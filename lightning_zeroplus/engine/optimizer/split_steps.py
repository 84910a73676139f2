"""Let a torch optimizer that has several parameters in one flat tensor step them one by one.

Torch optimizers leave a parameter without a gradient alone, with its state: moments do not decay, weight decay does not
act, the step count stays. In a flat tensor such a parameter has a gradient of zero, and all of that happens. So from
the first step in which a parameter has no gradient, the optimizer gets a view of the flat tensor for each parameter,
and its state is cut at the same places. Until then all parameters have made the same steps, and nothing is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from lightning_zeroplus.checkpoint.names import is_step
from lightning_zeroplus.engine.optimizer.chain import parts_of
from lightning_zeroplus.weights.partitioned.alike import looking


class Stretch(NamedTuple):
    """Where a parameter lies in a flat tensor.

    Attributes:
        param: The parameter, by its index in ``module.parameters()``.
        offset: Where its elements begin in the flat tensor.
        numel: The number of its elements on this rank; 0 if only other ranks have elements.
    """

    param: int
    offset: int
    numel: int


class SplitSteps:
    """Steps of a torch optimizer without some parameters.

    Args:
        optimizer: Returns the torch optimizer.
        stretches: Returns the flat tensors that it updates, and the parameters that lie in them.

    Attributes:
        pieces: By ``id`` of a cut flat tensor: the views of it, by index of the parameter.
        has_whole_tensors: Whether the optimizer steps whole parameters, and ranks have the states of different ones.
    """

    has_whole_tensors = False

    def __init__(
        self, optimizer: Callable[[], Optimizer], stretches: Callable[[], Sequence[tuple[Tensor, Sequence[Stretch]]]]
    ) -> None:
        self._optimizer_of = optimizer
        self._stretches_of = stretches
        self.pieces: dict[int, dict[int, Tensor]] = {}
        self._stretches: list[tuple[Tensor, Sequence[Stretch]]] = []
        self._missing: frozenset[int] = frozenset()
        self._kept: list[tuple[dict[str, Any], list[Tensor]]] = []
        self._handles: list[Any] = []
        self._depth = 0
        self._is_looking = False

    def without(self, missing: frozenset[int]) -> None:
        """Let the next step leave these parameters alone."""
        if missing and not self._handles:
            self.split()
        self._missing = missing
        self._depth = 0  # the previous step may have raised

    def split(self) -> None:
        """Cut all flat tensors and their states."""
        if self._handles:
            return
        optimizer = self._optimizer_of()
        self._stretches = list(self._stretches_of())
        self._is_looking = any(part in looking for part in parts_of(optimizer))
        for flat, stretches in self._stretches:
            state = optimizer.state.pop(flat, {})
            pieces = {stretch.param: self._piece(flat, stretch) for stretch in stretches}
            self.pieces[id(flat)] = pieces
            for stretch in stretches if state else ():
                optimizer.state[pieces[stretch.param]] = dict(self._state(state, flat, stretch))
        self._handles = [
            optimizer.register_step_pre_hook(self._enter),
            optimizer.register_step_post_hook(self._leave),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # The `step` of a subclass may call its parent's, which torch gives the hooks as well.
        self._depth += 1
        if self._depth == 1:
            self._before_step(optimizer, args, kwargs)

    def _leave(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._after_step(optimizer, args, kwargs)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()  # the previous step may have raised
        for group in optimizer.param_groups:
            self._kept.append((group, group["params"]))
            group["params"] = [each for tensor in group["params"] for each in self._with_gradients(tensor)]

    def _with_gradients(self, tensor: Tensor) -> Iterator[Tensor]:
        pieces = self.pieces.get(id(tensor))
        if pieces is None:
            yield tensor
            return
        stretches = next(stretches for flat, stretches in self._stretches if flat is tensor)
        for stretch in stretches:
            piece = pieces[stretch.param]
            piece.grad = None if stretch.param in self._missing else self._gradient(tensor, stretch)
            yield piece

    def _piece(self, flat: Tensor, stretch: Stretch) -> Tensor:
        """The tensor that the optimizer steps for a parameter."""
        return flat.detach().view(-1).narrow(0, stretch.offset, stretch.numel).requires_grad_(flat.requires_grad)

    def _state(self, state: dict[str, Any], flat: Tensor, stretch: Stretch) -> Iterator[tuple[str, Any]]:
        """What of the state of ``flat`` belongs to a parameter."""
        return _cut(state, flat, stretch)

    def _gradient(self, flat: Tensor, stretch: Stretch) -> Tensor | None:
        return None if flat.grad is None else flat.grad.view(-1).narrow(0, stretch.offset, stretch.numel)

    def written_back(self) -> None:
        """Copy loaded pieces to the flat tensors; nothing to do if they share memory."""

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        for group, params in self._kept:
            group["params"] = params
        self._kept.clear()
        for pieces in self.pieces.values():
            for piece in pieces.values():
                piece.grad = None


def _cut(state: dict[str, Any], flat: Tensor, stretch: Stretch) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == flat.shape and not is_step(key):
            yield key, value.view(-1).narrow(0, stretch.offset, stretch.numel)
        else:
            # Pieces must not share a state that is updated in place.
            yield key, value.clone() if isinstance(value, Tensor) else value
