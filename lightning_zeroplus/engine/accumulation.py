"""What happens to gradients between two optimizer steps: every backward adds, nothing overwrites.

Upstream counts micro-batches to find the accumulation boundary, and decides from that count whether a reduced
gradient is copied over the partition or added to it. A loop with several backwards in one ``training_step`` breaks
the count: stages 1 and 2 take every backward for the boundary, stage 3 copies every time. Here ``step()`` is the
boundary, and "copy or add" is decided per parameter: the first gradient since the last step is copied, later ones
are added, and a parameter that got none has its stale partition zeroed.

One :class:`GradientAccumulation` belongs to one engine; its subclasses know how one family of optimizers stores
gradients (:mod:`.replicated` for stage 0 and ``BF16_Optimizer``, :mod:`.zero12`, :mod:`.zero3`). Gradients that are
not reduced in the backward which made them wait in a :class:`~.coalesce.Deferral`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lightning_zeroplus.engine.agreement import RankAgreement
from lightning_zeroplus.engine.clip import Clip
from lightning_zeroplus.engine.coalesce import Deferral, Guard, within_budget
from lightning_zeroplus.engine.deferred import Deferred
from lightning_zeroplus.engine.grad_dtypes import WireDtypes, ask_for_dtypes, grad_bytes, sum_dtype_of
from lightning_zeroplus.engine.specialize import specialize
from lightning_zeroplus.precision.grad_dtype import GRAD_DTYPES, expected_grad_dtype, normalized

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from lightning_zeroplus.engine.engine import ZeroPlusEngine

Reduction = Literal["backward", "step"]


class RoutedZeroGrad:
    """Mixin for the optimizer the user sees: ``zero_grad()`` discards every gradient since the last step.

    Lightning's ``LightningOptimizer`` inherits the *class* of the optimizer it wraps, so ``zero_grad`` runs with the
    wrapper as ``self`` and upstream's bookkeeping lands on the wrapper. Attribute look-up does reach the wrapped
    optimizer, and so its :class:`GradientAccumulation`.
    """

    gradient_accumulation: GradientAccumulation

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the accumulated gradients. They are always released, whatever ``set_to_none`` says."""
        self.gradient_accumulation.zero_grad()


class GradientAccumulation:
    """The gradients of one engine between two steps.

    Args:
        engine: The engine; its optimizer is ready.
        optimizer: The engine's optimizer, specialized in place with :attr:`mixin`.
        reduction: ``"backward"`` reduces at the end of every backward, ``"step"`` once, in ``step()``.
        accumulate_dtype: The dtype in which local gradients are summed; None: as the optimizer's config says.
        grad_dtypes: By name of the parameter, the dtype that its gradients have; None: that in which they come. For
            the others ``param.grad_dtype`` counts if the user has set it, then ``accumulate_dtype``.

    Attributes:
        deferral: The gradients that wait on this rank.
        wire_dtypes: The dtypes in which gradients are reduced.
        guard: Asked before a backward, a step and a ``zero_grad()``.
        pending: Some parameter has received a gradient since the last ``step()`` or ``zero_grad()``.
        unreduced: Some gradient waits for :meth:`reduce`.
        consumed: ``step()`` used the gradients and nobody called ``zero_grad()`` since.
        clip: What to clip in the next step.
    """

    mixin: type = RoutedZeroGrad
    #: Whether a parameter is empty on every rank while nobody uses it (stage 3).
    partitions_parameters = False

    def __init__(
        self,
        engine: ZeroPlusEngine,
        optimizer: Any,
        reduction: Reduction,
        accumulate_dtype: torch.dtype | None,
        grad_dtypes: Mapping[str, torch.dtype | None],
    ) -> None:
        self.engine = engine
        self.optimizer = specialize(optimizer, self.mixin)
        self.optimizer.gradient_accumulation = self
        self.reduction = reduction
        self.hooks_reduce = self._hooks_reduce()
        self.deferral = Deferral(self.hooks_reduce, always=reduction == "step")
        self.guard: Guard | None = None
        self.params: list[nn.Parameter] = list(engine.module.parameters())
        self.index = {id(param): index for index, param in enumerate(self.params)}
        self.pending = False
        self.unreduced = False
        self.consumed = False
        self.clip: Clip | None = None
        self._in_flight: set[int] = set()
        self._arriving: set[int] = set()
        self._agreement = RankAgreement(engine.device)
        self._direct_backward_end_queued = False
        self._handles: list[RemovableHandle] = [
            param.register_hook(partial(self._before_accumulate, index))
            for index, param in enumerate(self.params)
            if param.requires_grad
        ]
        self.wire_dtypes = WireDtypes(engine, self.optimizer, self.params, self.deferral)
        ask_for_dtypes(engine.module, grad_dtypes, accumulate_dtype or self._storage_dtype())

    def _hooks_reduce(self) -> bool:
        """Whether upstream's gradient hooks fill reduction buckets during backward."""
        return False

    def _storage_dtype(self) -> torch.dtype | None:
        """The dtype in which the optimizer keeps reduced gradients; None: that of the parameters."""
        return None

    # -- the life of a gradient, in order ------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Refuse a backward whose gradient would be clipped, which it would not be under DDP.

        Raises:
            RuntimeError: If clipping was already requested for the next step.
        """
        if self.clip is not None:
            raise RuntimeError(
                "backward() after clip_gradients() and before optimizer.step(). ZeRO clips inside step(), so this"
                " gradient would be clipped too. Call clip_gradients() after the last backward."
            )
        if self.guard is not None:
            self.guard.before_backward()

    def _before_accumulate(self, index: int, grad: Tensor | None) -> None:
        # A tensor hook: it runs right before autograd adds ``grad`` to ``param.grad``.
        if grad is None:
            return  # from a graph that needs the parameter, but gives it no gradient
        self.pending = True
        self._arriving.add(index)
        if not self.engine._running_engine_backward:
            self._queue_direct_backward_end()
        if index in self._in_flight:
            # param.grad is a view of a reduction bucket: adding to it now would count the first gradient twice.
            self.flush()
            # Backwards nest in this loop: one reduction per step is possible only if all of them wait.
            self.deferral.always = self.reduction == "step"
        if self.deferral.defers(index):
            self.unreduced = True
        else:
            self._in_flight.add(index)
            if self.is_reduced_by_all(index):
                self._agreement.note(index)
                if expected_grad_dtype(self.params[index]) is None:
                    self._agreement.note(GRAD_DTYPES.index(grad.dtype))  # which chooses the bucket

    def is_reduced_by_all(self, index: int) -> bool:
        """Whether the ranks have to agree on when this parameter's gradient comes."""
        return True

    def take(self, param: nn.Parameter) -> bool:
        """Called by upstream's gradient hook: whether the gradient is deferred, so that upstream must not see it."""
        return self.deferral.take(self.index[id(param)], param)

    def arrived(self, param: nn.Parameter) -> bool:
        """Called by upstream's gradient hook: whether there is a new gradient.

        Autograd calls the hook of a parameter without a gradient too. One of a compiled graph has none for autograd: it
        came to :meth:`receive`, and may still be in ``param.grad``.
        """
        index = self.index[id(param)]
        if index not in self._arriving:
            return False
        self._arriving.remove(index)
        return True

    def receive(self, index: int, grad: Tensor) -> None:
        """Take a gradient that autograd does not accumulate: from a compiled graph, or computed by hand in a backward.

        It goes where autograd's would: through the parameter's tensor hooks, into ``param.grad`` in the dtype that the
        parameter expects, and on to upstream's gradient hook.

        Args:
            index: Which parameter, in the order of ``module.parameters()``.
            grad: This rank's full gradient, or a summand of it, in the parameter's shape. It is copied where it is not
                used up at once.
        """
        param = self.params[index]
        for hook in list((param._backward_hooks or {}).values()):
            replaced = hook(grad)
            grad = grad if replaced is None else replaced
        grad = normalized(grad.detach(), param)
        with self.full_shape(param):
            if param.grad is None:
                param.grad = grad.clone() if grad._base is not None or self._outlives_hook(index, param) else grad
            else:
                param.grad = param.grad + grad
        self.gradient_hook(param)

    def _outlives_hook(self, index: int, param: nn.Parameter) -> bool:
        """Whether the gradient itself, and not a copy in a bucket, waits after :meth:`gradient_hook`."""
        return True

    def gradient_hook(self, param: nn.Parameter) -> None:
        """What upstream does when autograd has accumulated a parameter's gradient."""

    @contextmanager
    def full_shape(self, param: nn.Parameter) -> Iterator[None]:
        """Let a parameter take a gradient, although it may be partitioned."""
        yield

    def index_by_id(self, id_: int) -> int:
        """The index of the parameter that DeepCompile calls ``id_``."""
        raise NotImplementedError

    def _queue_direct_backward_end(self) -> None:
        # The user called loss.backward() instead of manual_backward(): end it as engine.backward() would.
        if self._direct_backward_end_queued:
            return
        if self.engine.loss_scale_factor() != 1.0:
            raise RuntimeError(
                "loss.backward() under fp16: the loss was not scaled. Call self.manual_backward(loss) instead."
            )
        self.before_backward()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_direct_backward)
        self._direct_backward_end_queued = True

    def _end_direct_backward(self) -> None:
        self._direct_backward_end_queued = False
        self.engine._backward_epilogue()

    def flush(self) -> None:
        """Reduce what upstream's hooks (stages 2 and 3) have put into buckets, in the middle of a backward."""
        self._in_flight.clear()
        self.optimizer.independent_gradient_partition_epilogue()

    def before_epilogue(self) -> None:
        """Autograd is done with one backward, and upstream's epilogue comes next."""

    def end_backward(self) -> None:
        """The engine's epilogue of one backward is done: reduce, unless the hooks have or it can wait."""
        self._in_flight.clear()
        if self.reduction == "step":
            return
        if not self.deferral.holding:
            self.reduce_if_needed()
        elif self.deferral.only is not None and self.unreduced and not self.hooks_reduce:
            self.deferral.settle()
            self.reduce(self._trainable() - self.deferral.only)

    def reduce_if_needed(self) -> None:
        """Average what the ranks have accumulated since the last reduction."""
        if self.unreduced:
            self.unreduced = False
            self.deferral.settle()
            # Where a hook has reduced some of what was deferred, only the rest. Else all, also those which had no
            # gradient on this rank: they may have one on another.
            self.reduce(frozenset(self.deferral.sums) if self.deferral.split else self._trainable())
            self.deferral.split = False
            self.deferral.reduced()

    def _trainable(self) -> frozenset[int]:
        return frozenset(index for index, param in enumerate(self.params) if param.requires_grad)

    def reduce(self, members: frozenset[int]) -> None:
        """Average gradients over the ranks.

        Args:
            members: Indices of the parameters, the same on all ranks; those without a gradient count as zero.
        """
        raise NotImplementedError

    def finalize(self) -> None:
        """Make the averaged gradients ready for the optimizer; called by ``step()`` at the boundary."""
        raise NotImplementedError

    def total_norm(self) -> Tensor:
        """The global L2 norm of the averaged gradient, scaled as it is; called after :meth:`finalize`."""
        raise NotImplementedError

    def grad_norm(self) -> float | Tensor | None:
        """The global L2 norm of the last step's averaged, unscaled gradient before clipping by norm."""
        return self.engine.get_global_grad_norm()

    def before_step(self) -> bool:
        """Whether there is a gradient to step with.

        Raises:
            RuntimeError: If the gradients of the previous step were not zeroed.
        """
        if self.consumed:
            raise RuntimeError(
                "optimizer.step() without optimizer.zero_grad() since the previous step. Under DDP this step would use"
                " the previous gradients once more; ZeRO has released them. Call optimizer.zero_grad() after each"
                " step, or before its first backward."
            )
        self.deferral.settle()
        if self._in_flight:
            self.flush()  # a backward ended in an exception that the user has caught
        return self.pending

    def check_ranks_agree(self) -> None:
        """Make sure that upstream's hooks have filled the same buckets on every rank: see :class:`RankAgreement`."""
        if self.hooks_reduce:
            self._agreement.check()

    def after_step(self) -> None:
        """Forget the gradients that ``step()`` has used."""
        self.discard()
        self.consumed = True

    def zero_grad(self) -> None:
        """Forget every gradient since the last step, as ``zero_grad()`` does under DDP."""
        self._base_zero_grad()
        if self.engine.stepping:
            return  # upstream's own call in the middle of step(), which still needs the averaged gradients
        if self.guard is not None:
            self.guard.before_zero_grad(self.pending)
        self.discard()
        self.consumed = False

    def discard(self) -> None:
        """Drop accumulated gradients, half-filled buckets of an interrupted backward, and the clipping request."""
        self.pending = self.unreduced = False
        self.clip = None
        self.deferral.discard()
        self._in_flight.clear()
        self._direct_backward_end_queued = False

    def _base_zero_grad(self) -> None:
        optimizer: Any = self.optimizer
        super(RoutedZeroGrad, optimizer).zero_grad(set_to_none=True)  # type: ignore[misc]

    # -- windows -------------------------------------------------------------------------------------------------

    def hold(self, max_bytes: int | None) -> Deferred:
        """Defer what fits into ``max_bytes`` until :meth:`let_go`; see :func:`~.coalesce.within_budget`."""
        sizes = [grad_bytes(param) for param in self.params]
        only = None
        if max_bytes is not None:
            itemsize = max((sum_dtype_of(param).itemsize for param in self.params), default=4)
            only = within_budget(sizes, self.engine.zero_reduce_bucket_size() * itemsize, max_bytes)
        self.deferral.hold(only)
        chosen = [size for index, size in enumerate(sizes) if size and (only is None or index in only)]
        return Deferred(len(chosen), sum(chosen), sum(size > 0 for size in sizes), sum(sizes))

    def check_not_held(self) -> None:
        """Refuse a step whose gradients are not reduced yet.

        Raises:
            RuntimeError: Within ``no_sync()`` or a window; nothing has been changed.
        """
        if self.guard is not None:
            self.guard.before_step()
        if self.deferral.holding:
            raise RuntimeError(
                "optimizer.step() inside no_sync(): the gradients of this rank are not reduced yet, and the ranks would"
                " part. Leave no_sync() before the last backward of the step."
            )

    def held_bytes(self) -> int:
        """Bytes of local gradients that wait for a reduction."""
        return sum(grad.nbytes for grad in self.deferral.sums.values())

    # -- support -------------------------------------------------------------------------------------------------

    @contextmanager
    def retained_graph(self) -> Iterator[None]:
        """Around a backward with ``retain_graph=True``, so that the graph can be walked again."""
        yield

    def clipping(self) -> AbstractContextManager[None]:
        """Around ``optimizer.step()``: what clips by norm within it, where the next step does."""
        return nullcontext() if self.clip is None else self.clip.by_norm_in(self.optimizer)

    def clip_by_value(self, *grads: Tensor | None) -> None:
        """Clamp averaged, unscaled gradients in place if the next step clips by value."""
        if self.clip is not None:
            self.clip.clamp(*grads)

    def close(self) -> None:
        """Remove the tensor hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
