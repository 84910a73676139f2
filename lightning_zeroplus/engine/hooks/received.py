"""Gradients that autograd does not accumulate: from compiled graphs, or computed by hand within a backward."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from lightning_zeroplus.engine.reduction.life import Life, Phase, Place
from lightning_zeroplus.engine.upstream.partitioned_weights import without_modules
from lightning_zeroplus.gradients import loss_scale
from lightning_zeroplus.gradients.dtype import normalized
from lightning_zeroplus.gradients.tasks import current_task

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from lightning_zeroplus.engine.hooks.of_parameters import ParameterHooks
    from lightning_zeroplus.engine.reduction.local_sums import LocalSums


class ReceivesGradients:
    """The part of a gradient accumulation that takes such gradients, and has the tensor hooks of parameters."""

    params: list[nn.Parameter]
    hooks: ParameterHooks
    _hooked: set[int]
    _without_hooks: set[int]
    index: dict[int, int]
    local_sums: LocalSums
    hooks_reduce: bool
    life: Life
    _settled: int
    _before_accumulate: Callable[[int, Tensor | None], Tensor | None]
    missing_scale: Callable[[], float]

    def _watch(self, indices: Iterable[int]) -> None:
        for index in sorted(indices):
            self._hooked.add(index)
            lies = self.local_sums.may_lie_in_grad(index)
            hook = self._before_added if lies else self._before_accumulate
            self.hooks.register(self.params[index], partial(hook, index), rests=lies)

    def _before_added(self, index: int, grad: Tensor | None) -> Tensor | None:
        # What was found out for one gradient holds for the others of the same backward that are added to their sums.
        if (
            grad is not None
            and current_task() == self._settled
            and self.life.phase is Phase.WAITING
            and self.local_sums.lie_in_grads
            and self.params[index].requires_grad
        ):
            return None
        return self._before_accumulate(index, grad)

    def spare_hooks(self, handles: Iterable[RemovableHandle]) -> None:
        """Let upstream's gradient hooks, of these handles, see nothing of gradients that were added to their sums.

        And let them not keep the engine.
        """
        lie_in_grads = self.local_sums.any_in_grads
        index_of = {id(param._post_accumulate_grad_hooks): index for index, param in enumerate(self.params)}
        for handle in handles:
            hooks = handle.hooks_dict_ref()
            if lie_in_grads and not self.hooks_reduce:
                handle.remove()  # there are no others
            elif hooks is not None and handle.id in hooks:
                upstream = hooks[handle.id]
                hook = partial(self._after_accumulate, upstream) if lie_in_grads else upstream
                self.hooks.replace(handle, hook, rests=self.local_sums.may_lie_in_grad(index_of[id(hooks)]))

    def _after_accumulate(self, upstream: Callable[[Any], Any], param: nn.Parameter) -> None:
        if self.local_sums.lie_in_grads and self.local_sums.may_lie_in_grad(index := self.index[id(param)]):
            self.life.stays(index)
        else:
            upstream(param)

    @contextmanager
    def resting_hooks(self) -> Iterator[None]:
        """Around a backward that the engine runs: do without the hooks, if autograd does all that there is to do.

        They are called again as soon as that changes: no gradient waits any more, or none lies in ``param.grad``.
        """
        waits = self.life.phase is Phase.WAITING and self.local_sums.lie_in_grads
        if waits and self.missing_scale() == loss_scale.running() == 1.0 and self._all_are_whole():
            self.hooks.rest()
        try:
            yield
        finally:
            self.hooks.wake()

    def _all_are_whole(self) -> bool:
        """Whether all parameters have their full shape whose sums may lie in ``param.grad``."""
        return True

    def lost_hooks(self, index: int) -> None:
        self._without_hooks.add(index)

    def restore_hooks(self) -> None:
        """Let tensor hooks be called again that torch has set aside."""
        while self._without_hooks:
            param = self.params[self._without_hooks.pop()]
            param._backward_hooks = param._backward_hooks

    def receive(self, index: int, grad: Tensor) -> None:
        """Take a gradient that autograd does not accumulate.

        It goes the way of a gradient from autograd: through the parameter's tensor hooks, into ``param.grad`` in the
        dtype that the parameter expects, and on to upstream's gradient hook.

        Args:
            index: Index of the parameter in ``module.parameters()``.
            grad: This rank's full gradient, or a summand of it, in the parameter's full shape and any float dtype. It
                is copied if it is needed after this call.
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
        """Whether the gradient itself, and not a copy in a bucket, is needed after :meth:`gradient_hook`."""
        return True

    def gradient_hook(self, param: nn.Parameter) -> None:
        """Call upstream's hook for a parameter whose gradient was accumulated."""

    @contextmanager
    def full_shape(self, param: nn.Parameter) -> Iterator[None]:
        """Let a parameter that may be partitioned take a gradient in its full shape, within."""
        yield

    def index_by_id(self, id_: int) -> int:
        """The index of the parameter that DeepCompile calls ``id_``."""
        raise NotImplementedError


class TakesWholeGradients(ReceivesGradients):
    """The same at stage 3, where a parameter may be partitioned when its gradient comes.

    Autograd accumulates in the current shape of a parameter, and its accumulation node accepts the shape that the
    parameter had when the node was made. Here both are the full shape. Needed by functions that take parameters as
    arguments and differentiate in a backward of their own, such as checkpointing by hand.
    """

    def take_whole_gradients(self) -> None:
        """Accept whole gradients from now on, from autograd and by ``param.receive_gradient(grad)``."""
        self._partitions: dict[int, Tensor] = {}
        for index, param in enumerate(self.params):
            if param.requires_grad:
                param.receive_gradient = partial(self.receive, index)  # type: ignore[attr-defined]
        self._keep_nodes()
        _TAKE_WHOLE.add(self)

    def _keep_nodes(self) -> None:
        """Keep accumulation nodes in the full shape; autograd would make new ones."""
        self._nodes = []
        for param in self.params:
            if param.requires_grad:
                with torch.enable_grad(), self.full_shape(param):
                    self._nodes.append(param.view_as(param).grad_fn.next_functions[0][0])  # type: ignore[union-attr]

    def _after_accumulate(self, upstream: Callable[[Any], Any], param: nn.Parameter) -> None:
        self.accumulated(param)
        super()._after_accumulate(upstream, param)

    def leave_whole_gradients(self) -> None:
        """Undo :meth:`take_whole_gradients`."""
        self._nodes.clear()
        _TAKE_WHOLE.discard(self)
        for param in self.params:
            vars(param).pop("receive_gradient", None)

    def _all_are_whole(self) -> bool:
        params: Iterable[Any] = self.local_sums.in_grads
        return all(param.ds_status is ZeroParamStatus.AVAILABLE for param in params)

    def _before_added(self, index: int, grad: Tensor | None) -> Tensor | None:
        param: Any = self.params[index]
        is_whole = param.ds_status is ZeroParamStatus.AVAILABLE
        return super()._before_added(index, grad) if is_whole else self._before_accumulate(index, grad)

    def _before_accumulate(self, index: int, grad: Tensor | None) -> Tensor | None:
        scaled: Tensor | None = super()._before_accumulate(index, grad)
        param: Any = self.params[index]
        if param.shape != param.ds_shape and self.life.place(index) is Place.ARRIVING:
            self._partitions[index] = param.data
            param.data = _placeholder(param)
        return scaled

    def accumulated(self, param: nn.Parameter) -> None:
        """After autograd has accumulated a gradient: give a partitioned parameter its partitioned data back."""
        if self._partitions and self.index[id(param)] in self._partitions:
            param.data = self._partitions.pop(self.index[id(param)])

    @contextmanager
    def full_shape(self, param: Any) -> Iterator[None]:
        if param.shape == param.ds_shape:
            yield
            return
        partitioned = param.data
        param.data = _placeholder(param)
        try:
            yield
        finally:
            param.data = partitioned


def _placeholder(param: Any) -> Tensor:
    """A tensor in the full shape of the parameter, with the memory of one element."""
    return torch.empty((), dtype=param.dtype, device=param.device).expand(param.ds_shape)


_TAKE_WHOLE: WeakSet[TakesWholeGradients] = WeakSet()


def release_dropped() -> None:
    """Free the engines of stage 3 that nobody has any more, with their modules, and end what they replace.

    A dropped engine of another stage is garbage. Of one of stage 3 torch keeps the parameters, by the accumulation
    nodes that the engine keeps; Python does not see that, and the parameters know the engine. And upstream keeps the
    modules, as long as the process.
    """
    if not _TAKE_WHOLE:
        return
    with without_modules():
        for nodes in [each._nodes for each in _TAKE_WHOLE]:
            nodes.clear()
        gc.collect()
    for each in list(_TAKE_WHOLE):
        each._keep_nodes()
