"""Let a torch optimizer that needs whole tensors step them, although each rank has a flat partition.

LARS and LAMB use the norm of a tensor, Adafactor its rows and columns, Muon its singular vectors. A partition cuts few
parameters: at most one at each of its ends. Parameters that are not cut are stepped as views in their own shape. A cut
parameter is stepped whole by each rank that has a part of it. An all-reduce gives all ranks its whole gradient, and
each rank keeps its part of the result. The optimizer state of a cut parameter is whole on these ranks, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zeroplus.checkpoint.names import is_step
from lightning_zeroplus.engine.families.masters import take_over
from lightning_zeroplus.engine.optimizer.split_steps import SplitSteps, Stretch
from lightning_zeroplus.engine.reduction.exchange import Piece
from lightning_zeroplus.weights.partitioned.alike import stand_for


class _Cut(NamedTuple):
    """A cut parameter of which this rank has a part.

    Attributes:
        param: The module's parameter.
        whole: The tensor that the optimizer steps, in the parameter's shape.
        mine: This rank's part, a view of the flat tensor.
        start: The first element of the part, in the flattened parameter.
    """

    param: nn.Parameter
    whole: Tensor
    mine: Tensor
    start: int


class WholeSteps(SplitSteps):
    """Steps of a torch optimizer on whole parameters.

    Args:
        optimizer: Returns the torch optimizer.
        stretches: Returns the flat tensors that it updates, and the parameters that lie in them.
        params: The module's parameters, by index; each rank has the whole weights.
        owned: The pieces of each rank's partition.
        group: The process group of the ranks.
    """

    has_whole_tensors = True

    def __init__(
        self,
        optimizer: Callable[[], Optimizer],
        stretches: Callable[[], Sequence[tuple[Tensor, Sequence[Stretch]]]],
        params: Sequence[nn.Parameter],
        owned: Sequence[Sequence[Piece]],
        group: Any,
    ) -> None:
        super().__init__(optimizer, stretches)
        self._params, self._group = params, group
        self._starts = {piece.param: piece.start for piece in owned[dist.get_rank(group)]}
        parts = Counter(piece.param for pieces in owned for piece in pieces)
        self._cut_somewhere = {param for param, count in parts.items() if count > 1}
        self._cut: dict[int, _Cut] = {}
        self._gathered: dict[int, Tensor] = {}
        self.split()

    def _piece(self, flat: Tensor, stretch: Stretch) -> Tensor:
        param, part = self._params[stretch.param], super()._piece(flat, stretch)
        if stretch.param not in self._cut_somewhere:
            view = part.detach().view(param.shape if stretch.numel else -1).requires_grad_(flat.requires_grad)
            return stand_for(view, param) if self._is_looking else view
        if not stretch.numel:
            return part
        whole = param.detach().to(flat.device, flat.dtype, copy=True).requires_grad_(flat.requires_grad)
        self._cut[stretch.param] = _Cut(param, whole, part.detach(), self._starts[stretch.param])
        return stand_for(whole, param) if self._is_looking else whole

    def _state(self, state: dict[str, Any], flat: Tensor, stretch: Stretch) -> Iterator[tuple[str, Any]]:
        piece = self.pieces[id(flat)][stretch.param]
        for key, value in super()._state(state, flat, stretch):
            if isinstance(value, Tensor) and value.numel() and not is_step(key):
                # Only Adagrad has a state before its first step, which is the same for all elements.
                yield key, value.new_full(piece.shape, float(value.view(-1)[0]))
            else:
                yield key, value

    def _gradient(self, flat: Tensor, stretch: Stretch) -> Tensor | None:
        if stretch.param in self._cut:
            return self._gathered[stretch.param]
        grad = super()._gradient(flat, stretch)
        return None if grad is None else grad.view(self.pieces[id(flat)][stretch.param].shape)

    def _with_gradients(self, tensor: Tensor) -> Iterator[Tensor]:
        self._gather(tensor)
        # Not the empty ones, which are no matrices: the optimizer may require matrices.
        yield from [piece for piece in super()._with_gradients(tensor) if piece.numel()]

    def _gather(self, flat: Tensor) -> None:
        """Gather the gradients of cut parameters in ``flat`` from the parts of all ranks by one all-reduce."""
        stretches = next((stretches for each, stretches in self._stretches if each is flat), ())
        cut = [stretch for stretch in stretches if stretch.param in self._cut_somewhere]
        if not cut:
            return
        sizes = [self._params[stretch.param].numel() for stretch in cut]
        sums = torch.zeros(sum(sizes), dtype=flat.dtype, device=self._params[cut[0].param].device)
        for stretch, whole in zip(cut, sums.split(sizes), strict=True):
            if stretch.numel and flat.grad is not None:
                part = flat.grad.view(-1).narrow(0, stretch.offset, stretch.numel)
                whole.narrow(0, self._starts[stretch.param], stretch.numel).copy_(part)
        dist.all_reduce(sums, group=self._group)
        for stretch, whole in zip(cut, sums.split(sizes), strict=True):
            here = self._cut.get(stretch.param)
            if here is not None:
                take_over(here.whole, here.param)  # the user may have written to the parameter
                self._gathered[stretch.param] = whole.view(here.param.shape).to(flat.device)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        super()._after_step(optimizer, args, kwargs)
        self.written_back()

    @torch.no_grad()
    def written_back(self) -> None:
        for _, whole, mine, start in self._cut.values():
            mine.copy_(whole.view(-1).narrow(0, start, mine.numel()))
        self._gathered.clear()
