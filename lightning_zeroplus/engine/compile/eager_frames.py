"""Parameters of code that Dynamo leaves to Python, at ZeRO stage 3: gathered on access, released after use.

DeepCompile removes ZeRO-3's module hooks, which Dynamo would capture. In a frame that Dynamo skips (a graph break
within a loop, ``torch.compiler.disable``, an unsupported construct), a parameter is therefore still partitioned when
Python reads it. Here an access through the module gives a full tensor instead:

* The tensor is not stored in the parameter, so the parameter does not change and no guard depends on it. Whoever uses
  the tensor keeps it alive. Besides, the tensors of the module accessed last are kept, and small ones until the step.
* Its gradient goes to a leaf with the parameter's shape but without its memory, where autograd sums all uses in a
  backward, and from there to the engine's reduction.
* Where autograd would save it for backward, saved-tensor hooks save a note instead, and backward gathers it again.

The order of gathers depends only on the order of accesses, never on when memory is freed. So it is the same on all
ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from deepspeed.compile.z3_eager_fallback import DeepCompileZ3EagerFallback, is_dynamo_guard_evaluation
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils.z3_leaf_module import z3_leaf_parameter
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zeroplus.engine.compile.dynamo import invisible
from lightning_zeroplus.engine.compile.meter import GatherMeter
from lightning_zeroplus.weights.partitioned.access import unwatched

_Hooks = torch._C._autograd


class _Note(NamedTuple):
    """A view of a gathered parameter that autograd has saved."""

    param: Any
    owner: object
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    step: int


class EagerFrames(DeepCompileZ3EagerFallback):
    """Replaces upstream's fallback, which keeps what it gathers until backward ends, and reduces no gradient.

    Args:
        engine: The engine.
        receive: Takes a parameter and its full gradient.
        grad_dtype: Returns the dtype that the gradient of a parameter should have.
        resident_numel: Parameters with fewer elements stay gathered until the step.
        meter: Counts gathered bytes.

    Attributes:
        modules: Names of the modules whose parameters were read in Python, and the bytes gathered for each so far.
    """

    def __init__(
        self,
        engine: Any,
        receive: Callable[[Any, Tensor], None],
        grad_dtype: Callable[[Any], torch.dtype | None],
        resident_numel: int,
        meter: GatherMeter,
    ) -> None:
        super().__init__(engine)
        self.modules: dict[str, int] = {}
        self._receive = receive
        self._grad_dtype = grad_dtype
        self._resident_numel = resident_numel
        self._meter = meter
        self._names = {id(module): name for name, module in engine.module.named_modules()}
        self._leaves: dict[int, Tensor] = {}
        self._owner: object = None
        self._kept: dict[int, Tensor] = {}
        self._resident: dict[int, Tensor] = {}
        self._storages: dict[int, tuple[StorageWeakRef, Any, object]] = {}
        self._steps = 0
        self._in_backward = 0
        self._packs = True
        self._seen = False
        self._dicts = list(self._inject())

    # -- access ---------------------------------------------------------------------------------------------------

    def _inject(self) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
        for module in self.engine.module.modules():
            original = module._parameters
            module._parameters = GatheringParameters(module, original.items(), self)
            yield module, original

    def close(self) -> None:
        """Give the modules their own parameter dictionaries back."""
        for module, original in self._dicts:
            original.clear()
            original.update(OrderedDict.items(module._parameters))  # type: ignore[arg-type]
            module._parameters = original
        self._dicts.clear()
        self.forget()

    @property
    def active(self) -> bool:
        """Whether an access gathers: within the engine's forward, and in what a backward recomputes."""
        return self._depth > 0 or self._in_backward > 0

    def read(self, param: Any, owner: GatheringParameters) -> Tensor:
        """The full parameter; differentiable if the parameter requires grad and grad mode is on."""
        self._seen = True
        self.record_gathered_param(param)
        full = self._full(param, owner)
        if not (param.requires_grad and torch.is_grad_enabled()):
            return full
        return _Use.apply(self._leaf(param), _Hidden(full))

    def record_gathered_param(self, param: Any) -> None:
        """Count the access; nothing has to be released."""
        self.total_gathered_params += 1

    def _full(self, param: Any, owner: object) -> Tensor:
        together = [param]
        if z3_leaf_parameter(param):
            # Ranks may use different parameters of a leaf module: all ranks gather all of them at the first access.
            owner = param.ds_z3_leaf_module
            together = self.engine.optimizer.leaf_parameters[owner]
        if owner is not self._owner:
            self._kept.clear()
            self._owner = owner
        for other in together:
            places = self._resident if other.ds_numel < self._resident_numel else self._kept
            if other.ds_id not in places:
                places[other.ds_id] = self._all_gather(other, owner)
            if other is param:
                full = places[other.ds_id]
        return full

    @torch.no_grad()
    def _all_gather(self, param: Any, owner: object) -> Tensor:
        group = param.ds_process_group
        shard = param.ds_tensor.detach().reshape(-1).to(self.engine.device)
        buffer = torch.empty(shard.numel() * dist.get_world_size(group=group), dtype=shard.dtype, device=shard.device)
        dist.all_gather_into_tensor(buffer, shard, group=group)
        self._meter.gathered(buffer)
        module = self._names.get(id(getattr(owner, "_parent_module", owner)), "")
        self.modules[module] = self.modules.get(module, 0) + buffer.nbytes
        storage = buffer.untyped_storage()
        self._storages = {key: value for key, value in self._storages.items() if not value[0].expired()}
        self._storages[storage._cdata] = (StorageWeakRef(storage), param, owner)
        return buffer[: param.ds_numel].view(param.ds_shape)

    # -- gradients ------------------------------------------------------------------------------------------------

    def _leaf(self, param: Any) -> Tensor:
        leaf = self._leaves.get(param.ds_id)
        if leaf is None:
            leaf = torch.empty((), dtype=param.dtype, device=self.engine.device).expand(param.ds_shape)
            leaf.requires_grad_()
            dtype = self._grad_dtype(param)
            if dtype != leaf.dtype:
                leaf.grad_dtype = dtype

            @invisible
            def hand_over(leaf: Tensor) -> None:
                grad, leaf.grad = leaf.grad, None
                assert grad is not None
                self._receive(param, grad)

            leaf.register_post_accumulate_grad_hook(hand_over)
            self._leaves[param.ds_id] = leaf
        return leaf

    # -- saved tensors --------------------------------------------------------------------------------------------

    @invisible
    def _pack(self, tensor: Tensor) -> Any:
        found = self._storages.get(tensor.untyped_storage()._cdata)
        if found is None or found[0].expired():
            return tensor.detach()
        _, param, owner = found
        return _Note(param, owner, tensor.size(), tensor.stride(), int(tensor.storage_offset()), self._steps)

    @invisible
    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Note):
            return packed
        if packed.step != self._steps and packed.param.requires_grad:
            raise RuntimeError(
                "A backward through a forward from before optimizer.step(): it needs a parameter that has been modified"
                " since. Run the forward again."
            )
        return self._full(packed.param, packed.owner).as_strided(packed.size, packed.stride, packed.offset)

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Disable the saved-tensor hooks for a compiled graph, which saves partitioned parameters."""
        top = _Hooks._top_saved_tensors_default_hooks(False) if self._hooked else None
        ours = top is not None and top[0] == self._pack
        if ours:
            _Hooks._pop_saved_tensors_default_hooks()
        try:
            yield
        finally:
            if ours:
                _Hooks._push_saved_tensors_default_hooks(self._pack, self._unpack)

    # -- when -----------------------------------------------------------------------------------------------------

    _hooked = False

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Let accesses gather within the engine's forward; only small parameters stay gathered afterwards."""
        self._depth += 1
        outermost = self._depth == 1
        if outermost:
            self.release_available_params_for_next_forward()
            self._seen = False
            # Hooks slow down every operation. If the last forward read no parameter in Python, the next needs none.
            self._hooked = self._packs
        if outermost and self._hooked:
            _Hooks._push_saved_tensors_default_hooks(self._pack, self._unpack)
        try:
            with self._plain_parameters():
                yield
        finally:
            if outermost and self._hooked:
                _Hooks._pop_saved_tensors_default_hooks()
                self._hooked = False
            self._depth -= 1
            if outermost:
                self._packs = self._seen
                self._drop()

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        """Let accesses gather within a backward, which may recompute parts of the forward."""
        self._in_backward += 1
        try:
            with self._plain_parameters():
                yield
        finally:
            self._in_backward -= 1
            self._drop()

    def _plain_parameters(self) -> AbstractContextManager[None]:
        # Dynamo guards the class of each parameter, and traces its __torch_function__.
        return unwatched(self.engine.gradient_accumulation.params)

    def _drop(self) -> None:
        self._kept.clear()
        self._owner = None

    def forget(self) -> None:
        """Drop all that was gathered: the parameters have changed."""
        self._drop()
        self._resident.clear()
        self._steps += 1


class GatheringParameters(ZeROOrderedDict):
    """A module's parameters; an access from Python gives the full parameter.

    Args:
        module: The module.
        items: The module's parameters by name.
        frames: Gathers the parameters.
    """

    def __init__(self, module: nn.Module, items: Any, frames: EagerFrames) -> None:
        super().__init__(module)
        for name, param in items:
            OrderedDict.__setitem__(self, name, param)
        self._frames = frames

    # When a skipped frame calls it, Dynamo would capture it as a frame of its own, where is_compiling() is True.
    @invisible
    def __getitem__(self, key: str) -> Any:
        """The full parameter; the parameter itself for Dynamo, and outside the engine's forward and backward."""
        param: Any = super().__getitem__(key)
        if torch.compiler.is_compiling():
            return param
        frames = self._frames
        if (
            not frames.active
            or getattr(param, "ds_status", None) is not ZeroParamStatus.NOT_AVAILABLE
            or is_dynamo_guard_evaluation()
        ):
            return param
        return frames.read(param, self)


class _Hidden(NamedTuple):
    """Hides a tensor from autograd."""

    tensor: Tensor


class _Use(torch.autograd.Function):
    """Makes a full parameter look as if it were computed from its leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, full: Any) -> Tensor:
        return full[0].view_as(full[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
