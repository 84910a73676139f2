"""FSDP2 where ranks run different units: each takes part in the gathers, and the reductions, of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from lightning_zeroplus.fsdp.gloo_comms import with_known_sizes
from lightning_zeroplus.fsdp.late_grads import grad_dtype
from lightning_zeroplus.fsdp.replicas import ReplicatedGroup
from lightning_zeroplus.fsdp.whole.aliases import outside
from lightning_zeroplus.fsdp.whole.layout import as_stored, gather_now
from lightning_zeroplus.gradients.patches.transforms import outside_transforms
from lightning_zeroplus.gradients.ranks.agreement import Announcement, Fingerprint, Presence
from lightning_zeroplus.gradients.ranks.lockstep import Copy, End, Flush, Gather, Lockstep, Write
from lightning_zeroplus.gradients.ranks.own_collectives import in_step, meeting_before_collectives
from lightning_zeroplus.gradients.shown import read_plain
from lightning_zeroplus.weights.errors import check_not_traced, converted_error


class GroupInStep(ReplicatedGroup):
    """Mixin of a unit's group, bound at run time: it gathers and reduces only when all ranks do.

    Attributes:
        in_step: What the ranks do together.
        number: Of the group, among those of all units.
        first: Of its first parameter, among those of all groups.
        converted: The dtype that a parameter had when the fit began, and another one, which it has now.
    """

    in_step: UnitsInStep
    number: int
    first: int
    converted: tuple[torch.dtype, torch.dtype] | None = None

    @outside_transforms()
    def unshard(self, async_op: bool = False) -> None:
        """Gather; the caller waits for it, and copies it out."""
        outside.settle(param.sharded_param for param in self.fsdp_params)
        is_there = self._all_gather_result is not None or self.is_unsharded
        if self.converted is not None:
            raise converted_error(*self.converted)
        if not is_there:
            check_not_traced()
        if is_there or self.in_step.may_gather(self.number):
            with in_step():
                self._gather(async_op)

    def _gather(self, async_op: bool = False) -> None:
        """Gather the shards after what the current stream writes to them.

        FSDP2's streams wait for the current one when the outermost forward begins, and not for writes within it.
        """
        if self.in_step.was_written:
            self.in_step.was_written = False
            self.comm_ctx.all_gather_copy_in_stream.wait_stream(self.device_handle.current_stream())
        super().unshard(async_op)

    @outside_transforms()
    def wait_for_unshard(self) -> None:
        super().wait_for_unshard()

    @outside_transforms()
    def gather(self) -> None:
        """Gather, as all ranks do now."""
        self._gather()

    @outside_transforms()
    def join(self) -> None:
        """Take part in a gather of which this rank needs nothing."""
        there = self._all_gather_result, self._sharded_state, [param.sharded_state for param in self.fsdp_params]
        self._all_gather_result = None
        self._now(ShardedState.SHARDED, [ShardedState.SHARDED] * len(self.fsdp_params))
        try:
            self._gather()
            result: Any = self._all_gather_result
        finally:
            self._all_gather_result = there[0]
            self._now(*there[1:])
        if result is not None:
            event, work = result.all_gather_event, result.all_gather_work
            if isinstance(work, dist.Work):
                work.wait()
            if event is not None:  # its memory is free for what follows on any of the streams
                self.device_handle.current_stream().wait_event(event)
                _wait_all_gather_streams(self, event)

    def _now(self, state: ShardedState, states: Sequence[ShardedState]) -> None:
        self._sharded_state = state
        for param, each in zip(self.fsdp_params, states, strict=True):
            param.sharded_state = each

    @outside_transforms()
    def post_backward(self, *unused: Any) -> None:
        if self.reduce_grads:
            self.fill_in()
        members = self._with_gradients() if self.reduce_grads else ()
        if not members or self.in_step.may_reduce(members, among_shards=not self.all_reduce_grads):
            with with_known_sizes():
                super().post_backward(*unused)
            return
        self.reduce_grads = False
        try:
            super().post_backward(*unused)
        finally:
            self.reduce_grads = True

    def _with_gradients(self) -> tuple[tuple[int, torch.dtype], ...]:
        with as_stored():
            return tuple(
                (number, grad_dtype(param._unsharded_param))
                for number, param in enumerate(self.fsdp_params, self.first)
                if hasattr(param, "_unsharded_param")
                and (read_plain(param._unsharded_param) is not None or param.unsharded_accumulated_grad is not None)
            )

    def contribute(
        self, members: Iterable[tuple[int, torch.dtype]], among_shards: bool
    ) -> list[tuple[int, Callable[[], None]]]:
        """Reduce gradients of zero, as the others reduce theirs. What waits for other replicas goes on waiting.

        Returns:
            Numbers of parameters, and what adds the result to the gradient of this rank's shard.
        """
        chosen = [(number, dtype, self.fsdp_params[number - self.first]) for number, dtype in members]
        names: tuple[str, ...] = ("_training_state", "reduce_grads", "all_reduce_grads", "reshard_after_backward")
        names += ("_partial_reduce_output", "_members", "_partial_reduce_output_layout", "_post_backward_pending")
        kept: list[tuple[Any, str, Any]] = [(self, name, getattr(self, name)) for name in names if hasattr(self, name)]
        with as_stored():
            kept += [(param.sharded_param, "grad", param.sharded_param.grad) for *_, param in chosen]
            for param in self.fsdp_params:
                kept += [(param._unsharded_param, "grad", param._unsharded_param.grad)]
                if "unsharded_accumulated_grad" in vars(param):  # from torch 2.15 on it is the unsharded gradient
                    kept += [(param, "unsharded_accumulated_grad", param.unsharded_accumulated_grad)]
                    param.unsharded_accumulated_grad = None
                param._unsharded_param.grad = None
            try:
                for _, dtype, param in chosen:
                    param.sharded_param.grad = None
                    param._unsharded_param.grad = torch.zeros_like(param._unsharded_param, dtype=dtype)
                self.reduce_grads, self.all_reduce_grads, self.reshard_after_backward = True, not among_shards, False
                self._partial_reduce_output = None
                super().post_backward()
                self._wait_for_post_backward()
                for *_, param in chosen:
                    if param.grad_offload_event is not None:
                        param.grad_offload_event.synchronize()
                        param.grad_offload_event = None
                if among_shards:
                    return [(self.first + at, partial(self.add_sum, at, value)) for at, value in self.sums().items()]
                return [
                    (number, partial(_add, param.sharded_param, param.sharded_param.grad))
                    for number, _, param in chosen
                ]
            finally:
                for owner, name, value in kept:
                    setattr(owner, name, value)


class UnitsInStep:
    """What the ranks do together with the groups of all units.

    Args:
        groups: Of all units, outermost first, with the names of the units; each will be a :class:`GroupInStep`.
        device: Where the parameters are.

    Attributes:
        is_reducing: What is left of all ranks is reduced: nothing has to be agreed on.
        was_written: Shards were written since the last gather.
        hosts: The ranks, whose tensors are the host's; None: there is one rank.
    """

    def __init__(self, groups: Sequence[tuple[str, Any]], device: torch.device) -> None:
        self._names = [name for name, _ in groups]
        self.groups = [group for _, group in groups]
        self.is_reducing = False
        self.was_written = False
        self._device = device
        self._numbers = [number for number, group in enumerate(self.groups) for _ in group.fsdp_params]
        self.hosts = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        weights = [self._names[group] for group in self._numbers]
        announce = None if self.hosts is None else partial(Announcement, group=self.hosts)
        self._lockstep = Lockstep(announce, [*self._names, *weights], self._gather, self._contribute)
        self._meets = ExitStack()
        self._gathered: dict[int, Tensor] = {}
        self._diverged = False
        self._reduced: set[int] = set()
        self._early: list[tuple[int, Callable[[], None]]] = []

    def note_write(self, together: bool) -> None:
        """This rank is about to write its shard of a weight, as all ranks are to do.

        What others still read before comes first, if this rank knows that they differ.

        Args:
            together: All ranks are at the same place, as within ``zp.gathered()``.
        """
        self.was_written = True
        if not together and self._lockstep.diverged:
            self._lockstep.meet(Write())

    def meet_before_collectives(self, meet: Callable[[], Any]) -> None:
        """From now on, until :meth:`close`, the ranks meet before a collective that the user's code calls."""
        if self.hosts is not None:
            self._meets.enter_context(meeting_before_collectives(meet))

    def are_whole(self) -> bool:
        """Whether no forward needs a gather, until a weight is written or a step comes."""
        return all(group.is_whole() for group in self.groups)

    def reduce_among_shards(self, only: bool) -> None:
        """Expect reductions without an all-reduce between replicas. Every rank has met the others right before."""
        self._lockstep.expect_by(int(only))

    def may_gather(self, number: int) -> bool:
        """Whether all ranks gather this group now; if not, it is gathered here when this returns."""
        return self._lockstep.meet(Gather((number,)))

    def gather(self, number: int, weight: Tensor) -> Tensor:
        """The whole of one weight, of the parameter with this number, in memory of its own."""
        if self._lockstep.meet(Gather((len(self.groups) + number,))):
            return gather_now(weight)
        return self._gathered.pop(number)

    def may_copy(self, number: int) -> bool:
        """Whether all ranks copy this weight now, each its part; if not, this one has to gather it for a copy."""
        return self._lockstep.meet(Copy(len(self.groups) + number))

    def may_reduce(self, members: tuple[tuple[int, torch.dtype], ...], among_shards: bool) -> bool:
        """Whether all ranks reduce these parameters now; if not, they wait for the end of the backward."""
        if self.is_reducing:
            return True
        fingerprint = Fingerprint()
        for number, _ in members:
            fingerprint.note(number)
        fingerprint.note(among_shards)
        if self._diverged or not self._lockstep.meet(Flush(fingerprint.value, None, members, among_shards)):
            self._diverged = True
            return False
        self._reduced.update(number for number, _ in members)
        return True

    def end(self, number: int = 0) -> bool:
        """A backward has come to its end, or forwards that none follows.

        Args:
            number: That this rank brings along.

        Returns:
            Whether all ranks have done the same, and brought the same number. All of them know. If not, some may have
            gradients that are not reduced.
        """
        self._lockstep.begin_end(End(Flush(number, None, ())))
        alike = self._lockstep.end()
        reduced, early = self._reduced, self._early
        self.begin_anew()
        if not alike:
            # Others may have reduced zeros only, like this rank: then there is no gradient.
            somewhere = Presence(range(len(self._numbers)), reduced, self._device).result()
            with as_stored(), torch.no_grad():
                for index, add in early:
                    if index in somewhere:
                        add()
        return alike

    def begin_anew(self) -> None:
        """Forget what this rank has done since the last end."""
        self._diverged, self._reduced, self._early = False, set(), []

    def close(self) -> None:
        """The fit is over."""
        self._meets.close()
        if self.hosts is not None and dist.is_initialized():
            dist.destroy_process_group(self.hosts)

    def _gather(self, numbers: Iterable[int], kept: Iterable[int]) -> None:
        needed = set(kept)
        for number in numbers:
            if number >= len(self.groups):
                self._gather_weight(number - len(self.groups), number in needed)
                continue
            group = self.groups[number]
            if group._use_post_forward_mesh:
                raise RuntimeError(
                    f"The ranks run different modules, and the weights of {self._names[number]!r} are resharded to"
                    " fewer ranks after a forward. Call `fully_shard(module, reshard_after_forward=True)`."
                )
            if number in needed:
                group.gather()
            else:
                group.join()

    def _gather_weight(self, number: int, is_needed: bool) -> None:
        group = self.groups[self._numbers[number]]
        weight = gather_now(group.fsdp_params[number - group.first].sharded_param)
        if is_needed:
            self._gathered[number] = weight

    def _contribute(self, flush: Flush) -> bool:
        # The others are in their backward. This rank may zero or read its gradients before it begins its own.
        if flush.members:
            group = self.groups[self._numbers[flush.members[0][0]]]
            self._early += group.contribute(flush.members, flush.among_shards)
        return False


def _wait_all_gather_streams(group: Any, event: Any) -> None:
    wait = getattr(group, "_wait_all_gather_streams_on_event", None)
    wait = wait or group.comm_ctx.wait_all_gather_streams_on_event  # from torch 2.15 on
    wait(event)


def _add(param: nn.Parameter, grad: Any) -> None:
    held: Any = param.grad
    if held is None:
        param.grad = grad
    else:
        held._local_tensor.add_(grad._local_tensor)
