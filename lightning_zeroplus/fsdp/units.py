"""The units of a sharded module: FSDP2 gathers, and reduces, each unit in one collective."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_zeroplus.fsdp.gloo_comms import use_gloo_comms
from lightning_zeroplus.fsdp.late_grads import grad_dtype, groups, parameters
from lightning_zeroplus.fsdp.replicas import ReplicatedGroup, is_replicated
from lightning_zeroplus.fsdp.scalars import ReplicatedScalar, agree
from lightning_zeroplus.fsdp.whole.layout import as_stored
from lightning_zeroplus.gradients.ranks.agreement import Presence
from lightning_zeroplus.gradients.shown import read_plain


def unsharded_by_sharded(module: FSDPModule) -> dict[nn.Parameter, nn.Parameter]:
    """The unsharded parameters of a unit by their sharded ones, without the parameters of nested units.

    FSDP2 keeps the same objects for as long as the module lives; only their storage comes and goes. The unit is
    gathered once, by all ranks together, and sharded afterwards.
    """
    assert isinstance(module, nn.Module)
    # Unsharding a unit replaces only its own parameters. A root may still be unsharded from an evaluation.
    module.reshard()
    with as_stored():
        before = dict(module.named_parameters())
        module.unshard()
        during = dict(module.named_parameters())
        module.reshard()
    return {before[name]: param for name, param in during.items() if param is not before[name]}


def end_backward(root: FSDPModule) -> None:
    """Reduce what backwards have left, as FSDP2 does at the end of a backward.

    This calls FSDP2's own callback. From torch 2.15 on there is a public ``finalize_backward``, which leaves out units
    that no backward has reached, and refuses gradients that wait for other replicas.
    """
    state: Any = fully_shard.state(root)  # type: ignore[attr-defined]
    if hasattr(state._state_ctx, "manual_backward_finalization_active"):
        state._state_ctx.manual_backward_finalization_active = False  # as when a backward begins
    state._root_post_backward_final_callback()


class Unit:
    """One module that ``fully_shard`` was applied to.

    Attributes:
        module: The module.
        name: The module's name; its class if it is the root; the first parameter's name if it is beside the module.
        params: The unsharded parameters, without the parameters of nested units.
        sharded: The optimizer's parameters, in the same order.
        syncs: Whether the next backward reduces this unit's gradients.
    """

    def __init__(self, module: FSDPModule, name: str) -> None:
        self.module = module
        self.name = name or type(module).__name__
        self.syncs = True
        exchanged = unsharded_by_sharded(module)
        self.params = list(exchanged.values())
        self.sharded = list(exchanged)
        self._accumulate_in_reduce_dtype()
        for group in groups(module):
            use_gloo_comms(group)

    def _accumulate_in_reduce_dtype(self) -> None:
        # Autograd then casts each gradient, whenever it comes: all have one dtype, without FSDP2's own accumulators.
        policy = getattr(fully_shard.state(self.module), "_mp_policy", None)  # type: ignore[attr-defined]
        dtype: torch.dtype | None = getattr(policy, "reduce_dtype", None)
        with as_stored():
            for param in self.params if dtype is not None else ():
                if param.dtype != dtype and param.is_floating_point():
                    param.grad_dtype = dtype

    def keep_grad_dtype(self) -> None:
        """Let what a backward still adds be summed in the reduce dtype: from torch 2.15 on FSDP2 defers the cast."""
        for group in groups(self.module):
            if hasattr(group, "_set_unsharded_grad_dtypes"):
                group._set_unsharded_grad_dtypes(defer_upcast=False)

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The unsharded parameters that require a gradient."""
        return [param for param in self.params if param.requires_grad]

    @property
    def grad_bytes(self) -> int:
        """Bytes of the unsharded gradients of the trainable parameters."""
        return sum(param.numel() * grad_dtype(param).itemsize for param in self.trainable)

    def set_sync(self, sync: bool) -> None:
        """Set whether the next backwards reduce this unit's gradients."""
        self.syncs = sync
        self.module.set_requires_gradient_sync(sync, recurse=False)

    def reduce_among_shards(self) -> None:
        """If there are replicas, let the next backwards leave out the all-reduce between them, until `set_sync`."""
        if any(is_replicated(group) for group in groups(self.module)):
            self.module.set_requires_all_reduce(False, recurse=False)

    def _replicated(self) -> list[ReplicatedGroup]:
        return [group for group in groups(self.module) if isinstance(group, ReplicatedGroup)]

    def gradients(self) -> list[tuple[nn.Parameter, bool]]:
        """The unsharded parameters, each with whether it has an unreduced gradient."""
        accumulated = {
            record._unsharded_param
            for record in parameters(self.module)
            if record.unsharded_accumulated_grad is not None
        }
        return [(param, param.grad is not None or param in accumulated) for param in self.params]

    def waiting(self) -> set[nn.Parameter]:
        """The unsharded parameters whose gradients have been reduced, but not between replicas."""
        return {
            group.fsdp_params[position]._unsharded_param for group in self._replicated() for position in group.waiting
        }

    def drop(self) -> None:
        """Drop the gradients, reduced or not."""
        self.zero(self.params)
        with as_stored():
            for param in self.sharded:
                param.grad = None

    def drop_sums(self) -> None:
        """Drop what waits for the other replicas."""
        for group in self._replicated():
            group.drop_sums()

    def zero(self, params: Collection[nn.Parameter], set_to_none: bool = True) -> None:
        """Drop the unreduced gradients of these unsharded parameters, or zero them."""
        with as_stored(), torch.no_grad():
            for param in params:
                param.grad = None if set_to_none or param.grad is None else param.grad.zero_()
        chosen = {id(param) for param in params}
        for group in self._replicated():
            group.drop_sums(chosen, set_to_none)


class Units:
    """All units below a module, outermost first.

    Args:
        module: The module; its parameters are materialized.
        beside: Units of the module's parameters that are not below it: see :mod:`.beside`.
    """

    def __init__(self, module: nn.Module, beside: Iterable[nn.Module] = ()) -> None:
        self.all: list[Unit] = []
        self.roots: list[FSDPModule] = []
        nested: set[nn.Module] = set()
        names = {param: name for name, param in module.named_parameters()}
        self.params = frozenset(names)
        others = ((names[next(each.parameters())], each) for each in beside)
        for name, child in (*module.named_modules(), *others):
            unit: Any = child
            if isinstance(unit, FSDPModule):
                self.all.append(Unit(unit, name))
                if child not in nested:
                    self.roots.append(unit)
                    nested.update(child.modules())
        for root in self.roots:
            state: Any = fully_shard.state(root)  # type: ignore[attr-defined]
            if len(state._modules) == 1:
                state._lazy_init()  # on all ranks, even if they do not run this root
        records = [record for unit in self.all for record in parameters(unit.module)]
        self._scalars = [record for record in records if isinstance(record, ReplicatedScalar)]

    def groups(self) -> list[tuple[str, Any]]:
        """The groups of parameters that are gathered together, each with the name of its unit."""
        return [(unit.name, group) for unit in self.all for group in groups(unit.module)]

    def set_sync(self, sync: bool, only: Collection[Unit] | None = None) -> None:
        """Set whether the next backwards reduce the gradients of all units, or of ``only`` some."""
        for unit in self.all if only is None else only:
            unit.set_sync(sync)

    def reduce_among_shards(self, only: Collection[Unit] | None = None) -> None:
        """Let the next backwards leave out the all-reduce between replicas, until :meth:`set_sync`."""
        for unit in self.all if only is None else only:
            unit.reduce_among_shards()

    @property
    def have_replicas(self) -> bool:
        """Whether gradients are all-reduced between replicas of some unit."""
        return any(is_replicated(group) for _, group in self.groups())

    def held_bytes(self) -> int:
        """Bytes of unsharded gradients that wait on this rank for a reduction."""
        with as_stored():
            return sum(param.grad.nbytes for unit in self.all for param in unit.params if param.grad is not None)

    def unsharded(self, sharded: Iterable[Tensor] | None = None) -> dict[Unit, list[nn.Parameter]]:
        """By unit, the unsharded parameters of these sharded ones; None: of all."""
        wanted = None if sharded is None else {id(param) for param in sharded}
        return {
            unit: [
                param
                for param, shard in zip(unit.params, unit.sharded, strict=True)
                if wanted is None or id(shard) in wanted
            ]
            for unit in self.all
        }

    def have_reduced(self) -> bool:
        """Whether a parameter has a reduced gradient."""
        with as_stored():
            return any(param.grad is not None for unit in self.all for param in unit.sharded)

    def have_late(self) -> bool:
        """Whether gradients came to a unit after its reduction in this backward.

        A unit is reduced when the backward has reached its inputs. The backward may reach the unit again: through a
        second forward that was recomputed, or from a gradient penalty.
        """
        with as_stored():
            return any(read_plain(param) is not None for unit in self.all if unit.syncs for param in unit.params)

    def check_reduced(self) -> None:
        """Refuse gradients that came to a unit after its reduction.

        Raises:
            RuntimeError: If there are any: they would be added to the gradients of the next step.
        """
        with as_stored():
            late = [
                type(unit.module).__name__ for unit in self.all if any(read_plain(p) is not None for p in unit.params)
            ]
        if late:
            raise RuntimeError(
                f"The units {late} have gradients that came after their reduction: this step would go without them, and"
                " the next would use them. Call `store.flush()` before the last backward of a step."
            )

    def reduce(self) -> None:
        """Reduce the gradients that backwards have accumulated without reducing.

        FSDP2 reduces at the end of a backward.
        """
        self.set_sync(True)
        self._fill_in()
        for root in self.roots:
            state: Any = fully_shard.state(root)  # type: ignore[attr-defined]
            if state._is_root:  # before its first forward there is nothing to reduce
                end_backward(root)

    def agree(self) -> None:
        """Give all ranks the same reduced gradients of scalars; a collective, after a reduction."""
        if self._scalars:
            with as_stored(), torch.no_grad():
                agree(self._scalars)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        with as_stored():
            return next((param.device for unit in self.all for param in unit.params), torch.device("cpu"))

    def _fill_in(self) -> None:
        """Give parameters a gradient of zero if another rank has one: the collective needs it on all ranks.

        A gradient that waits for other replicas is reduced with the next one, too.
        """
        with as_stored():
            gradients = [each for unit in self.all for each in unit.gradients()]
            here = {index for index, (_, is_there) in enumerate(gradients) if is_there}
            waiting = {param for unit in self.all for param in unit.waiting()}
            waits = {index for index, (param, _) in enumerate(gradients) if param in waiting}
            for index in Presence(range(len(gradients)), here | waits, self.device).result() - here:
                param = gradients[index][0]
                param.grad = torch.zeros(param.shape, dtype=grad_dtype(param), device=param.device)

    def drop_sums(self) -> None:
        """Drop what waits for the other replicas: units outlive a fit if the user has sharded the module."""
        for unit in self.all:
            unit.drop_sums()

    def drop(self) -> None:
        """Drop all gradients, reduced or not."""
        for unit in self.all:
            unit.drop()

    def reset(self) -> None:
        """Reset FSDP2 after an exception in a forward or a backward, so that a forward can begin; no collective."""
        for root in self.roots:
            if fully_shard.state(root)._is_root:  # type: ignore[attr-defined]
                with as_stored():  # it drops gradients, from torch 2.15 on the reduced ones too
                    if hasattr(root, "reset_iter_state"):
                        root.reset_iter_state()
                    else:
                        self._end_without_reducing(root)

    def _end_without_reducing(self, root: FSDPModule) -> None:
        """What ``FSDPModule.reset_iter_state`` does from torch 2.13 on: end the pass, and keep nothing of it."""
        state: Any = fully_shard.state(root)  # type: ignore[attr-defined]
        self.drop()
        of_root = [group for each in state._state_ctx.all_states for group in each._fsdp_param_groups]
        reduces = [group.reduce_grads for group in of_root]
        for group in of_root:
            group.reduce_grads = False
        end_backward(root)
        for group, reduce in zip(of_root, reduces, strict=True):
            group.reduce_grads = reduce
            group._to_sharded()
        state._state_ctx.iter_forward_root = None
