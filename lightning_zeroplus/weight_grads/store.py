"""WeightGradStore: weight gradients that a backward leaves for later.

The layer before a linear layer needs the gradient of its input at once; only the optimizer needs the gradient of its
weight. A pipeline schedule computes weight gradients where the pipeline would otherwise idle: `Qi et al., 2023, Zero
Bubble Pipeline Parallelism <https://arxiv.org/abs/2401.10241>`_.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_zeroplus.gradients.loss_scale import running, scaled_by


class _Entry(NamedTuple):
    param: nn.Parameter
    compute: Callable[..., Tensor]
    operands: tuple[Tensor, ...]
    owner: nn.Module | None
    #: With which the loss of the backward was multiplied that has left this gradient.
    loss_scale: float

    def belongs_to(self, modules: Collection[nn.Module], params: Collection[int]) -> bool:
        return id(self.param) in params or self.owner in modules


class WeightGradStore:
    """A queue of weight gradients that are not computed yet.

    ::

        store = WeightGradStore(max_bytes=2 * 2**30)
        defer_weight_grads(model, store=store)
        with store.defer():
            loss = model(batch)
            loss.backward()   # gradients of activations, biases and norms
        store.flush()         # gradients of the weights
        optimizer.step()

    A flush computes each gradient and hands it to autograd, as a backward of the weight itself. Tensor hooks,
    ``grad_dtype``, FSDP2 and a ZeRO engine then work as without the store. Flush on the stream on which the backward
    was called. With FSDP2 a unit's gradients must be complete before the unit's reduce-scatter:
    :class:`~lightning_zeroplus.fsdp.drain.Drain` flushes then.

    Args:
        max_bytes: Bytes of activations and output gradients that the store may keep alive. Beyond it, the oldest weight
            gradients are computed at once. None: no limit.

    Attributes:
        on_put: Called after each :meth:`put`, usually within a backward.

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

    # A copied or unpickled module gets a new, empty store.
    def __getstate__(self) -> dict[str, Any]:
        return {"max_bytes": self.max_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        WeightGradStore.__init__(self, **state)

    def __len__(self) -> int:
        """The number of waiting gradients."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes that the waiting gradients keep alive. A storage that several of them need counts once."""
        return sum(size for _, size in self._storages.values())

    @property
    def deferring(self) -> bool:
        """Whether layers that run forward now will defer their weight gradients."""
        return self._deferring

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Let the forwards within defer their weight gradients, whenever their backwards run.

        With activation checkpointing the backwards must be within too, because they repeat the forwards. An exception
        drops all waiting gradients.
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
        """Defer a gradient.

        Args:
            param: The leaf that gets the gradient.
            compute: ``compute(*operands)`` returns the gradient, of ``param``'s shape.
            operands: The tensors it needs. :attr:`nbytes` does not count tensors that ``compute`` holds otherwise.
            owner: The module of ``param``, for :meth:`flush`. Needed only if the module's parameters are replaced
                between backward and flush, as by FSDP2.
        """
        operands = tuple(operand.detach() for operand in operands)
        self._entries.append(_Entry(param, compute, operands, owner, running()))
        for address, size in _storages(operands).items():
            self._storages.setdefault(address, [0, size])[0] += 1
        if self.max_bytes is not None:
            while self._entries and self.nbytes > self.max_bytes:
                self._run(self._entries.popleft())
        if self.on_put is not None:
            self.on_put()

    def waits_for(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether the gradient of any of these parameters waits."""
        wanted = {id(param) for param in params} if self._entries else set()
        return any(id(entry.param) in wanted for entry in self._entries)

    def flush(self, where: nn.Module | Collection[nn.Parameter] | None = None) -> int:
        """Compute the waiting gradients, oldest first. An exception drops all of them.

        Args:
            where: Only the gradients of this module and its children, or of these parameters. None: all.

        Returns:
            The number of computed gradients.
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
        # A backward of the leaf, in which autograd casts to its grad_dtype, runs its hooks and accumulates.
        with scaled_by(entry.loss_scale):
            torch.autograd.backward((_leaf(entry.param, grad),), (grad,))

    def clear(self, where: nn.Module | Collection[nn.Parameter] | None = None) -> None:
        """Drop the waiting gradients.

        Args:
            where: As for :meth:`flush`.
        """
        for entry in self._take(where):
            self._release(entry)
        if where is None:
            self._storages.clear()  # including the gradients that an interrupted flush has taken

    def check_empty(self) -> None:
        """Refuse ``optimizer.step()`` while gradients wait.

        Raises:
            RuntimeError: If any wait: this step would lack them, and the next step would include them as well.
        """
        if self._entries:
            shapes = sorted({tuple(entry.param.shape) for entry in self._entries})
            raise RuntimeError(
                f"optimizer.step() while {len(self)} weight gradients (of shapes {shapes[:4]}) wait in the"
                " WeightGradStore: this step would lack them, and the next step would include them as well. Call"
                " store.flush() after the last backward, or store.clear() to drop them. Under FSDP2, flush before the"
                " reduce-scatter: ZeroPlusFSDPStrategy does, for every unit that is called through its forward()."
            )

    def watch(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Call :meth:`check_empty` before each ``optimizer.step()``.

        Returns:
            A handle whose ``remove()`` ends it.
        """
        return optimizer.register_step_pre_hook(lambda *_: self.check_empty())


def _leaf(param: nn.Parameter, grad: Tensor) -> Tensor:
    """The leaf that can take the gradient: the parameter, or a stand-in at ZeRO-3, where it may be partitioned."""
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
