"""FSDP2's group of parameters, watched, so that what users do between its collectives has an effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
from torch.utils._pytree import tree_leaves

from lightning_zeroplus.fsdp.kept import KeepingGroup
from lightning_zeroplus.fsdp.whole.aliases import outside
from lightning_zeroplus.fsdp.whole.layout import as_stored
from lightning_zeroplus.fsdp.whole.link import Gradients, Link
from lightning_zeroplus.gradients.patches.transforms import has_duals, is_transformed, outside_transforms
from lightning_zeroplus.gradients.tasks import current_task, makes_graph, refuse_earlier_average
from lightning_zeroplus.internals.containers import Calls, GivenContainers, given_containers, hidden_tensors

_TAKES_TRANSFORMS = "setup_context" in vars(RegisterPostBackwardFunction)


class WatchedGroup(KeepingGroup):
    """Mixin for a unit's group, bound at run time; each override calls ``super()``.

    Relies on FSDP2: only ``_to_sharded`` and ``_to_unsharded`` switch between the two states, ``post_backward`` is
    called in every backward that reaches the unit, and ``post_forward`` after each forward.

    Attributes:
        links: The parameters.
        gradients: Is told when a backward reaches the unit.
        await_end: Lets FSDP2 end its pass when the running backward is over.
        is_open: A graph may have weights that were not taken in the unit's own forward.
        keep: Stay unsharded after a forward that no backward follows: within an evaluation step.
        users_arguments: With what the caller has called the unit's module, before FSDP2 casts it.
        calls: The forward that runs, and those that have called it.
        written: The tensors that the last forward has written to them.
    """

    links: list[Link]
    gradients: Gradients
    await_end: Callable[[], None]
    keep = False
    users_arguments: Any = None
    calls: Calls
    written: Sequence[Tensor] = ()
    _has_own = False
    _awaits_backward = False
    is_open = False
    _differentiated = False  # a backward with create_graph=True has the weights in its graph
    _substituted = False
    _was_unsharded = False
    _ended_in = -1  # the last backward that has come to the end of the unit

    @property
    def in_pass(self) -> bool:
        """Whether a forward or a backward of the unit runs."""
        return self._training_state != TrainingState.IDLE

    @property
    def in_forward(self) -> bool:
        """Whether a forward of the unit runs."""
        return self._training_state is TrainingState.FORWARD

    @property
    def is_taken(self) -> bool:
        """Whether a graph has the unsharded parameters, from outside of the forward, or for a second derivative."""
        return self.is_open or self._differentiated

    @property
    def is_only_taken(self) -> bool:
        """Whether nothing but such a graph has them."""
        return self.is_taken and not self.in_pass and not self.keep

    def assign(self, link: Link, grad: Tensor | None) -> None:
        """In a backward, assign the gradient of one of the parameters, instead of what earlier ones have averaged.

        Raises:
            RuntimeError: If the running backward has added to that by now: DDP would average it in spite of this.
        """
        with as_stored():
            if link.sharded.grad is not None:
                if link.unsharded.grad is not None or self._ended_in == current_task():
                    refuse_earlier_average("assigned")
                link.sharded.grad = None
            link.unsharded.grad = grad

    def open(self) -> None:
        """Gather for a computation outside of the unit's own forward, until the backward is over, or the step."""
        self.is_open = True
        if not self.is_unsharded:
            self.unshard()
            self.wait_for_unshard()
        for link in self.links:
            link.await_gradient()

    def close(self) -> None:
        """Shard again: no graph has what :meth:`open` has gathered."""
        self.is_open = False
        if not self.in_pass:
            self._to_sharded()

    def reached(self) -> None:
        """Note that a backward has reached a weight that was taken outside of the unit's own forward."""
        if self._training_state is TrainingState.POST_BACKWARD:
            self._training_state = TrainingState.IDLE  # so that FSDP2 handles the unit once more at the end
        self.gradients.changed(link.unsharded for link in self.links)
        self.await_end()

    def reshard(self) -> None:
        if self.is_open or self._differentiated or self._has_own or (self.keep and not self.in_forward):
            return
        super().reshard()

    def note_own(self) -> None:
        """Note that the unsharded weights were written: within an evaluation step each rank may write others."""
        self._has_own = self.keep

    def unshard(self, async_op: bool = False) -> None:
        self._write_shown()
        super().unshard(async_op)

    def _write_shown(self) -> None:
        """Within ``zp.gathered()``: a forward has what was written to the copies, as it has if they are registered."""
        for link in self.links:
            if link.shown is not None:
                link.shown.write()

    @outside_transforms()
    def _to_unsharded(self) -> None:
        if self.is_unsharded:
            return
        was_kept = self.is_kept
        with as_stored():
            with self._keeping_substitutes():
                super()._to_unsharded()
            for link in self.links:
                link.opened(was_kept)

    @outside_transforms()
    def _to_sharded(self) -> None:
        outside.settle(link.sharded for link in self.links)
        was_unsharded = self.is_unsharded
        if was_unsharded:
            with as_stored():
                for link in self.links:
                    link.write_back()
        self._awaits_backward = self._differentiated = self.is_open = self._has_own = False
        with self._keeping_substitutes() if was_unsharded else nullcontext():
            super()._to_sharded()
        with as_stored():
            for link in self.links if was_unsharded and not self.is_kept else ():
                link.closed()

    def join(self) -> None:
        self._write_shown()
        if self.is_unsharded:
            with as_stored():
                for link in self.links:
                    link.write_back()  # to the shard that other ranks gather
        super().join()

    def _init_mp_dtypes(self) -> None:
        super()._init_mp_dtypes()
        if vars(self).get("_orig_dtype", torch.float32) is None and self.fsdp_params:  # each parameter's, from 2.15 on
            # All parameters are frozen in the first forward, for example a toggled optimizer's. FSDP2 would never cast
            # their gradients.
            self._orig_dtype, self._reduce_dtype = self.fsdp_params[0].orig_dtype, self.fsdp_params[0].reduce_dtype
        for param in self.fsdp_params:
            if param.param_dtype is None and param.reduce_dtype == param.orig_dtype:
                param.reduce_dtype = None  # nothing to cast: FSDP2 does not ask for each gradient's dtype

    def _set_unsharded_grad_dtypes(self, defer_upcast: bool) -> None:
        # From torch 2.15 on. FSDP2 would defer a cast, and sum several gradients of one backward in low precision.
        upstreams = getattr(super(), "_set_unsharded_grad_dtypes", None)
        if upstreams is not None:
            with as_stored():  # it reads unsharded gradients within a backward
                upstreams(False)

    def post_backward(self, *unused: Any) -> None:
        self.gradients.changed(link.unsharded for link in self.links)
        if current_task() != -1 and not self.in_step.is_reducing:
            # FSDP2 does this if a backward reaches the outputs. The backward of a gradient penalty may reach the inputs
            # only. The unit would then stay unsharded, with weights that the step makes outdated.
            self.await_end()
        with as_stored():
            # At the end of a backward FSDP2 calls this for units that were not reached, too. Some ranks may have no
            # gradients of a window for them; they are reduced with the rest of the window.
            is_left = self.reduce_grads and self.gradients.is_left(self.in_pass)
            self.reduce_grads = self.reduce_grads and not is_left
            self._differentiated = self._differentiated or makes_graph()
            try:
                super().post_backward(*unused)
            finally:
                self.reduce_grads = self.reduce_grads or is_left
                self._ended_in = current_task()

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.in_pass:
            self._substituted, self._was_unsharded = bool(self._substitutes()), self.is_unsharded
        users, self.users_arguments = self.users_arguments or (args, kwargs), None
        given = super().pre_forward(module, args, kwargs)
        self.calls.begin(users, given)
        return given

    @contextmanager
    def _keeping_substitutes(self) -> Iterator[None]:
        """Keep substitutes registered while FSDP2 registers other parameters: their user may check them afterwards."""
        substitutes = self._substitutes()
        yield
        for (module, name), tensor in substitutes.items():
            module._parameters[name] = tensor

    def _substitutes(self) -> dict[tuple[nn.Module, str], Any]:
        """The tensors that are registered instead of parameters, after following renamed parameters.

        ``torch.func.functional_call`` substitutes parameters during a call. ``torch.nn.utils.prune`` renames them.

        Raises:
            ValueError: If nothing is registered in the place of a parameter.
        """
        found = {}
        for module, name in self._follow_names():
            registered = module._parameters.get(name)
            if registered is None:
                raise ValueError(
                    f"The parameter {name!r} of {type(module).__name__} was taken away or moved during the fit."
                    " Under FSDP2 a module keeps its parameters from the beginning of a fit to its end: parametrize"
                    " it before the fit, in `__init__()` or `configure_model()`."
                )
            found[module, name] = registered
        return found

    def _follow_names(self) -> list[tuple[nn.Module, str]]:
        """Tell FSDP2 the new names of renamed parameters.

        Returns:
            The modules, with the parameter's name, in which a parameter is not registered under any name.
        """
        missing: list[tuple[nn.Module, str]] = []
        infos = [param._module_info for param in self.fsdp_params]
        there = [info.module._parameters.get(info.param_name) for info in infos]
        state = "_unsharded_param" if self.is_unsharded else "sharded_param"
        usual = [vars(param).get(state) for param in self.fsdp_params]
        if all(map(is_, there, usual)) and not any([info.shared_modules for info in infos]):
            return missing
        for param, info, registered in zip(self.fsdp_params, infos, there, strict=True):
            if not info.shared_modules and _is_own(registered, param):
                continue
            own = (param.sharded_param, getattr(param, "_unsharded_param", None))
            for module, name, rename in _places(param._module_info):
                if any(module._parameters.get(name) is each for each in own):
                    continue
                names = [other for other, each in module._parameters.items() if any(each is one for one in own)]
                if names:
                    rename(names[0])
                else:
                    missing.append((module, name))
        return missing

    def _register_post_backward_hook(self, args: Any, kwargs: Any) -> Any:
        # FSDP2's function does not support duals, nor transforms on older releases of torch: the end of the backward
        # reduces the unit.
        if has_duals() or (is_transformed() and not _TAKES_TRANSFORMS):
            return args, kwargs
        return super()._register_post_backward_hook(args, kwargs)

    def post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        # Graphs that do not run through the output may have the weights.
        self.is_open = self.is_open or is_transformed() or has_duals()
        output = super().post_forward(module, input, output)
        self.written = self.calls.end(input)
        if self._substituted:
            # Whoever has substituted will register again what was registered before.
            self._substituted = False
            if self.is_unsharded and not self._was_unsharded:
                self._to_sharded()
            return output
        if torch._C._current_graph_task_id() == -1 and self.is_unsharded:
            if _requires_grad(output) or _requires_grad(self.written):
                self._awaits_backward = True
            elif not self._awaits_backward and not self.keep:
                self.reshard()  # nothing that follows needs the weights, or it gathers them again
        return output


class WatchedState:
    """Mixin for the state of a unit: sees tensors in containers that FSDP2 does not look into.

    Attributes:
        casts: The calls of a module whose parameters are all in other units, so that it has no group.
    """

    casts: list[GivenContainers | None]

    def _root_pre_forward(self: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._note_arguments(args, kwargs)
        return super()._root_pre_forward(module, args, kwargs)  # type: ignore[misc]

    def _cast_forward_inputs(self: Any, args: Any, kwargs: Any) -> Any:
        self._note_arguments(args, kwargs)  # in a call within a call, too; older releases cast elsewhere
        cast = super()._cast_forward_inputs(args, kwargs)  # type: ignore[misc]
        if not self._fsdp_param_groups and self._training_state is TrainingState.FORWARD:
            self.casts.append(given_containers((args, kwargs), cast))
        return cast

    def _note_arguments(self: Any, args: Any, kwargs: Any) -> None:
        for group in self._fsdp_param_groups:
            if isinstance(group, WatchedGroup) and self._training_state is TrainingState.FORWARD:
                group.users_arguments = group.users_arguments or (args, kwargs)

    def _register_pre_backward_hook(self: Any, output: Any) -> Any:
        output = super()._register_pre_backward_hook(output)  # type: ignore[misc]
        called = self.casts.pop() if self.casts else None
        written = [] if called is None else called.follow()
        for group in self._fsdp_param_groups:
            if isinstance(group, WatchedGroup):
                written, group.written = [*written, *group.written], ()  # whose graph is not kept alive
        if torch.is_grad_enabled():
            for tensor in (*hidden_tensors(output), *written):
                if tensor.requires_grad:
                    tensor.register_hook(self._pre_backward)
        return output


def _is_own(registered: Any, param: Any) -> bool:
    """Whether this is one of the parameter's two forms."""
    return registered is param.sharded_param or registered is vars(param).get("_unsharded_param", param)


def _places(info: Any) -> Iterator[tuple[nn.Module, str, Callable[[str], None]]]:
    """The modules and names under which FSDP2 registers a parameter, each with a function that sets another name."""
    yield info.module, info.param_name, partial(setattr, info, "param_name")
    for index, (module, name) in enumerate(zip(info.shared_modules, info.shared_param_names, strict=True)):
        yield module, name, partial(info.shared_param_names.__setitem__, index)


def _requires_grad(output: Any) -> bool:
    if not torch.is_grad_enabled():
        return False
    leaves = tree_leaves(output)
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        return True
    return any(not isinstance(leaf, (torch.Tensor, int, float, str, bool, type(None))) for leaf in leaves)
