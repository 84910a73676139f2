"""Let a torch optimizer that needs whole tensors step them at stage 3, where every rank has a part of every parameter.

Each parameter has an owner: the rank that steps it, and keeps its optimizer state. In a step the owners receive the
parts of weights and gradients from all ranks, and send the updated parts back. The whole weights exist on the owner
alone, and only within the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zeroplus.checkpoint.names import is_step
from lightning_zeroplus.engine.optimizer.split_steps import SplitSteps, Stretch
from lightning_zeroplus.engine.reduction.exchange import Piece
from lightning_zeroplus.weights.partitioned.alike import stand_for


class OwnedSteps(SplitSteps):
    """Steps of a torch optimizer on whole parameters, each by one rank.

    Args:
        optimizer: Returns the torch optimizer.
        stretches: Returns the flat tensors that it updates, and the parameters that lie in them.
        params: The module's parameters, by index.
        owned: What each rank has of them.
        group: The process group of the ranks.
        device: Where the process group communicates.
        bucket_size: Most elements of an exchange, unless one parameter has more.
    """

    has_whole_tensors = True

    def __init__(
        self,
        optimizer: Callable[[], Optimizer],
        stretches: Callable[[], Sequence[tuple[Tensor, Sequence[Stretch]]]],
        params: Sequence[nn.Parameter],
        owned: Sequence[Sequence[Piece]],
        group: Any,
        device: torch.device,
        bucket_size: int,
    ) -> None:
        super().__init__(optimizer, stretches)
        self._params, self._device, self._bucket_size = params, device, bucket_size
        self._parts = [{piece.param: piece for piece in pieces} for pieces in owned]
        self._group, self._rank = group, dist.get_rank(group)
        self._owner = balanced({param: self._numel(param) for param in self._parts[0]}, len(owned))
        self._lent: list[tuple[list[int], dict[int, Tensor], dict[int, Tensor]]] = []
        self.split()

    def _numel(self, param: int) -> int:
        return sum(parts[param].numel for parts in self._parts)

    def _piece(self, flat: Tensor, stretch: Stretch) -> Tensor:
        param: Any = self._params[stretch.param]
        shape = param.ds_shape if self._owner[stretch.param] == self._rank else (0,)
        whole = torch.empty(shape, dtype=flat.dtype, device=flat.device)
        whole.untyped_storage().resize_(0)
        whole.requires_grad_(flat.requires_grad)
        return stand_for(whole, param) if self._is_looking else whole

    def _state(self, state: dict[str, Any], flat: Tensor, stretch: Stretch) -> Iterator[tuple[str, Any]]:
        for key, value in super()._state(state, flat, stretch):
            if isinstance(value, Tensor) and value.dim() and not is_step(key):
                piece = self.pieces[id(flat)][stretch.param]
                whole = self._to_owners([stretch.param], {stretch.param: value}).get(stretch.param, value[:0])
                yield key, whole.view(piece.shape)
            else:
                yield key, value

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._release()  # the previous step may have raised
        super()._before_step(optimizer, args, kwargs)

    def _with_gradients(self, tensor: Tensor) -> Iterator[Tensor]:
        pieces = self.pieces.get(id(tensor))
        if pieces is None:
            yield tensor
            return
        if tensor.grad is None:
            return
        stretches = next(stretches for flat, stretches in self._stretches if flat is tensor)
        here = {each.param: each for each in stretches if each.param not in self._missing}
        for bucket in self._buckets(here):
            weights = {param: _part(tensor.detach(), here[param]) for param in bucket}
            grads = {param: _part(tensor.grad, here[param]) for param in bucket}
            self._lent.append((bucket, weights, pieces))
            whole_grads = self._to_owners(bucket, grads)
            for param, whole in self._to_owners(bucket, weights).items():
                piece = pieces[param]
                piece.untyped_storage().resize_(piece.numel() * piece.element_size())
                piece.detach().copy_(whole.view(piece.shape))
                piece.grad = whole_grads[param].to(piece.device).view(piece.shape)
                yield piece

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        super()._after_step(optimizer, args, kwargs)
        for bucket, weights, pieces in self._lent:
            self._to_parts(bucket, pieces, weights)
        self._release()

    def _release(self) -> None:
        """Free the memory of the whole weights, which are stale from now on."""
        for bucket, _, pieces in self._lent:
            for param in bucket:
                pieces[param].untyped_storage().resize_(0)
        self._lent.clear()

    def _buckets(self, params: Iterable[int]) -> Iterator[list[int]]:
        bucket: list[int] = []
        for param in params:
            if bucket and sum(map(self._numel, [*bucket, param])) > self._bucket_size:
                yield bucket
                bucket = []
            bucket.append(param)
        if bucket:
            yield bucket

    def _by_owner(self, bucket: Iterable[int]) -> list[list[int]]:
        of_owner: list[list[int]] = [[] for _ in self._parts]
        for param in bucket:
            of_owner[self._owner[param]].append(param)
        return of_owner

    def _to_owners(self, bucket: Sequence[int], parts: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Give the owners what all ranks have of some parameters; a collective.

        Args:
            bucket: The parameters.
            parts: This rank's part of each, flat.

        Returns:
            The whole of those that this rank owns, flat.
        """
        by_owner = self._by_owner(bucket)
        received = self._exchange(
            [[parts[param] for param in params] for params in by_owner],
            [[rank_parts[param].numel for param in by_owner[self._rank]] for rank_parts in self._parts],
            parts[bucket[0]].dtype,
        )
        found = {}
        for number, param in enumerate(by_owner[self._rank]):
            found[param] = torch.cat([from_rank[number] for from_rank in received])
        return found

    def _to_parts(self, bucket: Sequence[int], whole: Mapping[int, Tensor], parts: Mapping[int, Tensor]) -> None:
        """Give all ranks their parts of what the owners have; a collective.

        Args:
            bucket: The parameters.
            whole: Those that this rank owns.
            parts: This rank's part of each, flat; written.
        """
        by_owner = self._by_owner(bucket)
        mine = [(param, whole[param].detach().view(-1)) for param in by_owner[self._rank]]
        received = self._exchange(
            [[flat.narrow(0, *rank_parts[param][1:]) for param, flat in mine] for rank_parts in self._parts],
            [[parts[param].numel() for param in params] for params in by_owner],
            parts[bucket[0]].dtype,
        )
        for params, from_owner in zip(by_owner, received, strict=True):
            for param, part in zip(params, from_owner, strict=True):
                parts[param].copy_(part)

    def _exchange(
        self, send: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[Sequence[Tensor]]:
        """Send each rank some flat tensors, and receive some of these sizes from each rank."""
        nothing = torch.empty(0, dtype=dtype, device=self._device)
        flat = torch.cat([nothing, *(tensor.to(self._device) for tensors in send for tensor in tensors)])
        send_sizes = [sum(tensor.numel() for tensor in tensors) for tensors in send]
        receive_sizes = [sum(each) for each in sizes]
        received = flat.new_empty(sum(receive_sizes))
        dist.all_to_all_single(received, flat, receive_sizes, send_sizes, self._group)
        return [part.split(list(each)) for part, each in zip(received.split(receive_sizes), sizes, strict=True)]


def balanced(numels: Mapping[int, int], ranks: int) -> dict[int, int]:
    """Give each parameter to one rank, so that all have about equally many elements.

    Args:
        numels: The number of elements of each parameter.
        ranks: The number of ranks.

    Returns:
        The rank of each parameter.
    """
    owner, load = {}, [0] * ranks
    for param in sorted(numels, key=lambda each: (-numels[each], each)):
        owner[param] = load.index(min(load))
        load[owner[param]] += numels[param]
    return owner


def _part(flat: Tensor, stretch: Stretch) -> Tensor:
    return flat.view(-1).narrow(0, stretch.offset, stretch.numel)
