"""WholeParameters: all parameters of a module's units behave like whole tensors during a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils as torch_foreach
from torch.utils.hooks import RemovableHandle

from lightning_zeroplus.fsdp.late_grads import groups
from lightning_zeroplus.fsdp.local_steps import on_shards
from lightning_zeroplus.fsdp.units import Units
from lightning_zeroplus.fsdp.whole.aliases import outside
from lightning_zeroplus.fsdp.whole.functions import same_parameters, whole_arguments
from lightning_zeroplus.fsdp.whole.group import WatchedGroup, WatchedState
from lightning_zeroplus.fsdp.whole.layout import as_stored
from lightning_zeroplus.fsdp.whole.link import Gradients, Link
from lightning_zeroplus.fsdp.whole.restore import allow_conversions, allow_copies, remove_conversions
from lightning_zeroplus.fsdp.whole.tensor import WholeDTensor, stepping, view_as_whole
from lightning_zeroplus.gradients.patches.block_steps import in_blocks
from lightning_zeroplus.gradients.patches.collectives import noting_collectives
from lightning_zeroplus.gradients.patches.labels import labels_for_profilers
from lightning_zeroplus.gradients.patches.specialize import generalize, specialize
from lightning_zeroplus.internals.containers import Calls

#: torch's elementwise optimizers, which can step shards.
_ELEMENTWISE = frozenset("Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop SGD".split())


class WholeParameters:
    """Lets the parameters of all units behave like whole ones.

    Args:
        units: The units.
        optimizers: The optimizers of the parameters; elementwise ones step the shards.
        originals: By sharded parameter, the parameter before it was sharded; its hooks are carried over.
        gradients: Is told before a gradient is accessed.
    """

    def __init__(
        self,
        units: Units,
        optimizers: Iterable[Optimizer],
        originals: Mapping[Tensor, Tensor],
        gradients: Gradients,
    ) -> None:
        optimizers = list(optimizers)
        optimized = (param for each in optimizers for group in each.param_groups for param in group["params"])
        self._from_the_start = units.params.union(optimized)
        self.groups: list[Any] = []
        self._classes: list[type] = []
        self._states: list[Any] = []
        for unit in units.all:
            state: Any = fully_shard.state(unit.module)  # type: ignore[attr-defined]
            for group in groups(unit.module):
                self._watch(group, originals, gradients, state._register_root_post_backward_final_callback)
            state.casts = []
            self._states.append(specialize(state, WatchedState))
        self._modules: list[Any] = [unit.module for unit in units.all]
        for module in self._modules:
            allow_copies(module)
            allow_conversions(module)
        self._running: dict[Optimizer, ExitStack] = {}
        self._gradients, self._are_complete = gradients, False
        self._handles: list[RemovableHandle] = []
        for optimizer in optimizers:
            self.step_by(optimizer)
        for supported in _foreach_registries():
            supported.append(WholeDTensor)  # like DTensor
        self._watching = ExitStack()
        self._watching.enter_context(same_parameters())
        self._watching.enter_context(whole_arguments())
        self._watching.enter_context(noting_collectives())
        self._watching.enter_context(labels_for_profilers())

    def _watch(
        self, group: Any, originals: Mapping[Tensor, Tensor], gradients: Gradients, await_end: Callable[[], None]
    ) -> None:
        links = []
        first = sum(len(each.fsdp_params) for each in self.groups)
        for index, param in enumerate(group.fsdp_params, first):
            if _is_unseen(param.sharded_param) and not isinstance(param._unsharded_param, DTensor):
                holder = originals.get(param.sharded_param)
                if holder is None:
                    holder = nn.Parameter(torch.empty(0))
                links.append(Link(param.sharded_param, param._unsharded_param, holder, group, index, gradients))
        number = len(self.groups)
        self.groups.append(group)
        self._classes.append(type(group))
        specialize(
            group,
            WatchedGroup,
            in_step=gradients.in_step,
            number=number,
            first=first,
            gradients=gradients,
            links=links,
            await_end=staticmethod(await_end),
            calls=Calls(),
        )
        group._init_mp_dtypes()  # again, now by the watched group's override

    # -- when roots are sharded again -----------------------------------------------------------------------------

    def shard(self) -> None:
        """Shard every unit that is still unsharded outside of a forward or backward; keeps writes to its parameters."""
        for group in self.groups:
            if group.is_unsharded and not group.in_pass:
                group._to_sharded()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Keep units gathered from one forward to the next within, during an evaluation step."""
        for group in self.groups:
            group.keep = True
        try:
            yield
        finally:
            for group in self.groups:
                group.keep = False
            self.shard()

    # -- steps ------------------------------------------------------------------------------------------------------

    def step_by(self, optimizer: Optimizer) -> None:
        """Let an optimizer step the parameters."""
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self.end_step(optimizer)  # of a step that has raised
        running = self._running[optimizer] = ExitStack()
        if closure is None:
            self._complete()
            self._enter_step(optimizer, running)
            return None

        def outside_of_step() -> Any:
            running.close()
            result = closure()
            self._complete()
            self._enter_step(optimizer, running)
            return result

        return args[:1], {**kwargs, "closure": outside_of_step}

    def _complete(self) -> None:
        """Make the gradients ready for a step that does not come through the strategy."""
        if not self._are_complete:
            self._gradients.complete("optimizer.step()")

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Within a step before which the strategy makes the gradients ready."""
        self._are_complete = True
        try:
            yield
        finally:
            self._are_complete = False

    def _enter_step(self, optimizer: Optimizer, running: ExitStack) -> None:
        outside.settle()
        for options in optimizer.param_groups:
            for param in options["params"]:
                link = getattr(param, "link", None)
                if isinstance(link, Link):
                    link.aliases.check()
                    with as_stored():
                        has_gradient = param.grad is not None
                    link.before_write(is_counted=has_gradient)
                elif param not in self._from_the_start:
                    raise ValueError(
                        "The optimizer has a parameter that the module did not have when the fit began: its gradients"
                        " are not averaged over the ranks. Make it before the fit, with `requires_grad_(False)` until"
                        " it is needed, or begin another fit."
                    )
        if _is_elementwise(optimizer):
            _shard_states(optimizer)
            running.enter_context(as_stored())
            running.enter_context(on_shards(optimizer))
            running.enter_context(in_blocks(optimizer))
            return
        _view_states(optimizer)  # that were loaded from a checkpoint
        running.enter_context(stepping())

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.end_step(optimizer)
        outside.follow(stepped=True)
        _view_states(optimizer)  # that the step has made: a DTensor's sum is the sum of this rank's part

    def end_step(self, optimizer: Optimizer) -> None:
        """Give the optimizer its parameters and states again, if they are those of a step that has not ended."""
        running = self._running.pop(optimizer, None)
        if running is not None:
            running.close()

    def close(self) -> None:
        """Undo everything; the units are sharded afterwards."""
        for optimizer in list(self._running):
            self.end_step(optimizer)
        for handle in self._handles:
            handle.remove()
        ended = outside.end(link.sharded for group in self.groups for link in group.links)
        for group, cls in zip(self.groups, self._classes, strict=True):
            if not group.in_pass:
                group._to_sharded()
            group.give_back()
            for link in group.links:
                link.close()  # which hands on what `ended` has
            group.__class__ = cls
        for state in self._states:
            generalize(state, WatchedState)
            del state.casts
        del ended
        for supported in _foreach_registries():
            supported.remove(WholeDTensor)
        self._watching.close()
        for module in self._modules:
            remove_conversions(module)


def _is_unseen(param: Tensor) -> bool:
    return isinstance(param, DTensor) and not isinstance(param, WholeDTensor)


def _view_states(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            view_as_whole(value)


@torch.no_grad()
def _shard_states(optimizer: Optimizer) -> None:
    """Cut whole tensors that the user has loaded: a copy of a state is whole, as it looks."""
    with as_stored():  # in less time: there are thousands of them
        whole = [
            (param, states, key)
            for param, states in optimizer.state.items()
            if isinstance(param, DTensor) and param.dim()
            for key, value in states.items()
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == param.shape
        ]
    for param, states, key in whole:
        spec = param._spec
        states[key] = distribute_tensor(states[key], spec.mesh, spec.placements, src_data_rank=None)


@contextmanager
def stepped_as_whole(optimizer: Optimizer) -> Iterator[None]:
    """Wrap the step by which torch makes the states that a checkpoint is read into, if nothing is watched yet."""
    if _is_elementwise(optimizer):
        yield
        return
    params = [param for group in optimizer.param_groups for param in group["params"] if _is_unseen(param)]
    for param in params:
        view_as_whole(param)
    try:
        with stepping():
            yield
    finally:
        made = (value for state in optimizer.state.values() for value in state.values())
        for each in (*params, *made):
            if isinstance(each, WholeDTensor):
                each.__class__ = DTensor  # type: ignore[assignment]


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Whether ``step`` is a method of one of torch's elementwise optimizers; subclasses may inherit it.

    On complex parameters these work through views as real tensors, which DTensor does not always have.
    """
    with as_stored():
        if any(param.is_complex() for group in optimizer.param_groups for param in group["params"]):
            return False
    found = [cls for cls in type(optimizer).__mro__ if "step" in vars(cls)]
    return bool(found) and found[0].__module__.startswith("torch.optim.") and found[0].__name__ in _ELEMENTWISE


def _foreach_registries() -> list[list[Any]]:
    return [torch_optimizer._foreach_supported_types, torch_foreach._foreach_supported_types]
