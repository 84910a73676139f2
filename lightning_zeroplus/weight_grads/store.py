"""WeightGradStore: weight gradients that a backward leaves for later.

The gradient of a linear layer's input is needed at once, by the layer before it; the gradient of its weight is needed
only by the optimizer. A pipeline schedule puts the second where it would otherwise wait: `Qi et al., 2023, Zero Bubble
Pipeline Parallelism <https://arxiv.org/abs/2401.10241>`_.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class _Entry(NamedTuple):
    param: nn.Parameter
    compute: Callable[..., Tensor]
    operands: tuple[Tensor, ...]
    owner: nn.Module | None

    def belongs_to(self, modules: Collection[nn.Module], params: Collection[int]) -> bool:
        return id(self.param) in params or self.owner in modules


class WeightGradStore:
    """Weight gradients that wait to be computed, oldest first.

    ::

        store = WeightGradStore(max_bytes=2 * 2**30)
        defer_weight_grads(model, store=store)
        with store.defer():
            loss = model(batch)
            loss.backward()   # gradients of activations, biases and norms
        store.flush()         # gradients of the weights
        optimizer.step()

    A flush hands each gradient to autograd, as a backward of the weight itself: tensor hooks, ``grad_dtype`` and
    whatever else watches ``weight.grad`` (FSDP2, a ZeRO engine) see what they would have seen without the store. Flush
    on the stream on which the backward was called. With FSDP2 a unit's gradients have to be there before that unit's
    reduce-scatter: :class:`~lightning_zeroplus.fsdp.drain.Drain` sees to it.

    Args:
        max_bytes: Bytes of activations and output gradients that the store may keep alive; the oldest weight gradients
            are computed as soon as there are more. None: no limit.

    Attributes:
        on_put: Called after each :meth:`put`, mostly within a backward.

    Raises:
        ValueError: If ``max_bytes`` is not a positive integer.
    """

    on_put: Callable[[], None] | None = None

    def __init__(self, max_bytes: int | None = None) -> None:
        if max_bytes is not None and (not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1):
            raise ValueError(f"`WeightGradStore(max_bytes={max_bytes!r})`: give a positive number of bytes, or None.")
        self.max_bytes = max_bytes
        self._entries: deque[_Entry] = deque()
        self._storages: dict[int, list[int]] = {}  # address -> [entries that use it, bytes]
        self._deferring = False

    # A copied or unpickled module gets a store of its own, which defers nothing until somebody uses it.
    def __getstate__(self) -> dict[str, Any]:
        return {"max_bytes": self.max_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        WeightGradStore.__init__(self, **state)

    def __len__(self) -> int:
        """How many gradients wait."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes that the waiting gradients keep alive. A tensor that several of them need counts once."""
        return sum(size for _, size in self._storages.values())

    @property
    def deferring(self) -> bool:
        """Whether forwards are made whose backwards leave their weight gradients here."""
        return self._deferring

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Let the weight gradients of the forwards within come here, whenever their backwards are.

        With activation checkpointing the backwards, which repeat the forwards, have to be within as well. An exception
        drops everything that waits.
        """
        before, self._deferring = self._deferring, True
        try:
            yield
        except BaseException:
            self.clear()
            raise
        finally:
            self._deferring = before

    def put(
        self,
        param: nn.Parameter,
        compute: Callable[..., Tensor],
        *operands: Tensor,
        owner: nn.Module | None = None,
    ) -> None:
        """Leave a gradient for later.

        Args:
            param: The leaf that the gradient is for.
            compute: ``compute(*operands)`` returns the gradient, of ``param``'s shape.
            operands: The tensors it needs. What it holds by other means is not counted in :attr:`nbytes`.
            owner: The module whose gradient it is, for :meth:`flush`; needed only where the module's parameters are
                replaced between backward and flush, as FSDP2 does.
        """
        operands = tuple(operand.detach() for operand in operands)
        self._entries.append(_Entry(param, compute, operands, owner))
        for address, size in _storages(operands).items():
            self._storages.setdefault(address, [0, size])[0] += 1
        if self.max_bytes is not None:
            while self._entries and self.nbytes > self.max_bytes:
                self._run(self._entries.popleft())
        if self.on_put is not None:
            self.on_put()

    def waits_for(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether a gradient of one of these parameters waits."""
        wanted = {id(param) for param in params} if self._entries else set()
        return any(id(entry.param) in wanted for entry in self._entries)

    def flush(self, where: nn.Module | Collection[nn.Parameter] | None = None) -> int:
        """Compute what waits, in the order in which it was put.

        Args:
            where: Only the gradients of this module and its children, or of these parameters. None: all.

        Returns:
            How many gradients were computed.
        """
        chosen = self._take(where)
        count = len(chosen)
        try:
            while chosen:
                self._run(chosen.popleft())
        except BaseException:
            self.clear()
            raise
        return count

    def _take(self, where: nn.Module | Collection[nn.Parameter] | None) -> deque[_Entry]:
        if where is None:
            chosen, self._entries = self._entries, deque()
            return chosen
        is_module = isinstance(where, nn.Module)
        modules = set(where.modules()) if isinstance(where, nn.Module) else set()
        params = {id(param) for param in (where.parameters() if is_module else where)}  # type: ignore[union-attr]
        chosen, left = deque[_Entry](), deque[_Entry]()
        for entry in self._entries:
            (chosen if entry.belongs_to(modules, params) else left).append(entry)
        self._entries = left
        return chosen

    def _release(self, entry: _Entry) -> None:
        for address in _storages(entry.operands):
            users = self._storages.get(address)
            if users is not None:
                users[0] -= 1
                if not users[0]:
                    del self._storages[address]

    def _run(self, entry: _Entry) -> None:
        with torch.no_grad():
            grad = entry.compute(*entry.operands)
        self._release(entry)
        # A backward of the leaf: autograd casts to its grad_dtype, runs its hooks and accumulates.
        torch.autograd.backward((_leaf(entry.param, grad),), (grad,))

    def clear(self, where: nn.Module | Collection[nn.Parameter] | None = None) -> None:
        """Drop what waits.

        Args:
            where: As for :meth:`flush`.
        """
        for entry in self._take(where):
            self._release(entry)
        if where is None:
            self._storages.clear()  # also of what a flush was about to compute

    def check_empty(self) -> None:
        """Refuse to go on while gradients wait.

        Raises:
            RuntimeError: If there are any: ``optimizer.step()`` would go without them, and they would be added to the
                next step's.
        """
        if self._entries:
            shapes = sorted({tuple(entry.param.shape) for entry in self._entries})
            raise RuntimeError(
                f"optimizer.step() while {len(self)} weight gradients (of shapes {shapes[:4]}) wait in the"
                " WeightGradStore: this step would go without them and the next would have them twice over. Call"
                " store.flush() after the last backward, or store.clear() to drop them. Under FSDP2, flush before the"
                " reduce-scatter: ZeroPlusFSDPStrategy does, for every unit that is called through its forward()."
            )

    def watch(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Let ``optimizer.step()`` raise while gradients wait.

        Returns:
            The handle that ends it.
        """
        return optimizer.register_step_pre_hook(lambda *_: self.check_empty())


def _leaf(param: nn.Parameter, grad: Tensor) -> Tensor:
    """The leaf that can take the gradient: the parameter, or at ZeRO-3, where it may be partitioned, a stand-in."""
    receive = getattr(param, "receive_gradient", None)
    if receive is None:
        return param
    leaf = torch.empty((), dtype=param.dtype, device=grad.device).expand(grad.shape).requires_grad_()
    if hasattr(param, "grad_dtype"):
        leaf.grad_dtype = param.grad_dtype
    leaf.register_post_accumulate_grad_hook(lambda leaf: receive(leaf.grad))
    return leaf


def _storages(tensors: tuple[Tensor, ...]) -> dict[int, int]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
