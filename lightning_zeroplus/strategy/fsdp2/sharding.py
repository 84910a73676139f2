"""The set-up of a module for ZeroPlusFSDPStrategy: sizes and meshes, units, dtypes, activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import psutil
import torch
import torch.distributed as dist
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zeroplus.fsdp.whole.restore import leave, restore, shard, units_of, unwrap_checkpointing
from lightning_zeroplus.fsdp.wrap import WrapPolicy, make_predicate, shard_children
from lightning_zeroplus.gradients.ranks.from_rank_0 import begin_alike
from lightning_zeroplus.strategy.common.arguments import check_backend, check_bool, check_timeout
from lightning_zeroplus.strategy.common.modules import (
    begin_fit,
    check_elements,
    check_groups,
    check_memory,
    check_modules,
    check_states,
    log_graphs,
    metrics_to,
)
from lightning_zeroplus.strategy.common.process import time_limit_of_new_groups
from lightning_zeroplus.strategy.fsdp2.checkpoint import CheckpointingFSDPStrategy
from lightning_zeroplus.strategy.fsdp2.originals import find_kept, stand_for_sharded, stand_for_themselves
from lightning_zeroplus.weights.partitioned.alike import in_form
from lightning_zeroplus.weights.partitioned.copies import own_class

if TYPE_CHECKING:
    import lightning.pytorch as pl

#: On the CPU weights stay whole until their backward if those of all ranks take at most this part of free memory.
_SPARE_SHARE = 8
#: On the CPU gradients of so many elements in all wait for the last micro-batch of a step: 256 MiB in fp32.
_WAITING_ELEMENTS = 2**26

#: The dtype in which FSDP2 gathers and computes, by the Trainer's precision; None: the parameters' dtype.
_PARAM_DTYPE: dict[str, torch.dtype | None] = {
    "32-true": None,
    "64-true": None,
    "bf16-true": None,
    "16-true": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}


class ShardingFSDPStrategy(CheckpointingFSDPStrategy):
    """Lightning's FSDP2 strategy; in addition it shards modules that do not call ``fully_shard`` themselves.

    For the arguments see :class:`~lightning_zeroplus.ZeroPlusFSDPStrategy`.
    """

    def __init__(
        self,
        wrap: WrapPolicy | None,
        reduce_dtype: torch.dtype | None,
        activation_checkpointing: WrapPolicy | None,
        offload: Literal["cpu"] | None,
        shard_size: int | Literal["auto"],
        replicate_size: int,
        tensor_parallel_size: int,
        save_distributed_checkpoint: bool,
        save_frozen: bool,
        save_async: bool,
        process_group_backend: str | None,
        timeout: timedelta | None,
        reshard_after_forward: bool | None,
    ) -> None:
        for name, policy in (("wrap", wrap), ("activation_checkpointing", activation_checkpointing)):
            _check(lambda name=name, policy=policy: make_predicate(policy, name))  # type: ignore[misc]
        if isinstance(activation_checkpointing, int):
            raise MisconfigurationException(
                f"`activation_checkpointing={activation_checkpointing!r}`: give module classes or a function of one."
            )
        if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
            raise MisconfigurationException(
                f"`reduce_dtype` must be a floating-point dtype or None, not {reduce_dtype!r}."
            )
        if offload not in (None, "cpu"):
            raise MisconfigurationException(f'`offload` must be "cpu" or None, not {offload!r}.')
        for name, size in (
            ("shard_size", 1 if shard_size == "auto" else shard_size),
            ("replicate_size", replicate_size),
            ("tensor_parallel_size", tensor_parallel_size),
        ):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise MisconfigurationException(f"`{name}` must be a positive integer, not {size!r}.")
        check_bool("save_distributed_checkpoint", save_distributed_checkpoint)
        if reshard_after_forward is not None:
            check_bool("reshard_after_forward", reshard_after_forward)
        self._set_saves(save_frozen, save_async)
        if not save_distributed_checkpoint and (not save_frozen or save_async):
            what = "save_async=True" if save_frozen else "save_frozen=False"
            raise MisconfigurationException(
                f"`{what}` is for sharded checkpoints: use it with `save_distributed_checkpoint=True`."
            )
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=check_backend(process_group_backend),
            timeout=check_timeout(timeout),
        )
        self.wrap = wrap
        self.reshard_after_forward = reshard_after_forward
        self.reduce_dtype = reduce_dtype
        self.activation_checkpointing = activation_checkpointing
        self.offload = offload
        self.shard_size = shard_size
        self.replicate_size = replicate_size
        self._originals: dict[str, nn.Parameter] = {}
        self._sharded: dict[str, Tensor] = {}
        self._beside: list[nn.Module] = []
        self._adopted: list[Optimizer] = []  # of a fit: those that others have replaced, too
        self._has_failed = False

    @override
    def setup_environment(self) -> None:
        precision = str(self.precision_plugin.precision)
        if precision not in _PARAM_DTYPE:
            raise MisconfigurationException(
                f"`ZeroPlusFSDPStrategy` does not support `Trainer(precision={precision!r})`: choose one of"
                f" {', '.join(_PARAM_DTYPE)}."
            )
        self._resolve_sizes()
        if self.offload and self._process_group_backend is None and self.root_device.type == "cuda":
            self._process_group_backend = "cpu:gloo,cuda:nccl"  # gloo reduces the gradient norm, in host memory
        with time_limit_of_new_groups(self._timeout):
            super().setup_environment()
            if self.replicate_size > 1:
                self._device_mesh = self._replicated_mesh()
                assert self.lightning_module is not None
                self.lightning_module._device_mesh = self._device_mesh

    def _resolve_sizes(self) -> None:
        world_size = self.num_nodes * self.num_processes
        assert isinstance(self._tensor_parallel_size, int)
        others = self.replicate_size * self._tensor_parallel_size
        if self.shard_size == "auto" and world_size % others == 0:
            self.shard_size = world_size // others
        if self.shard_size == "auto" or self.shard_size * others != world_size:
            raise MisconfigurationException(
                f"`shard_size={self.shard_size!r}` x `replicate_size={self.replicate_size}` x"
                f" `tensor_parallel_size={self._tensor_parallel_size}` must be the number of devices, {world_size}."
            )
        self._data_parallel_size = self.shard_size * self.replicate_size

    def _replicated_mesh(self) -> DeviceMesh:
        mesh = init_device_mesh(
            self.root_device.type,
            (self.replicate_size, self.shard_size, self._tensor_parallel_size),  # type: ignore[arg-type]
            mesh_dim_names=("replicate", "shard", "tensor_parallel"),
        )
        mesh["replicate", "shard"]._flatten("data_parallel")  # for Lightning's sampler
        return mesh

    @property
    def _shard_mesh(self) -> DeviceMesh:
        return self.device_mesh["replicate", "shard"] if self.replicate_size > 1 else self.device_mesh["data_parallel"]

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        self._has_failed = False
        if (left := _left.pop(module, None)) is not None:
            left._has_failed = False
            left.restore_module()
        self._check_saves(trainer)
        begin_fit(self, trainer)
        log_graphs(trainer)
        if not any(isinstance(each, FSDPModule) for each in module.modules()):
            self._shard(module)
        if self.offload:
            _materialize_distributed_module(module, torch.device("cpu"))
        with _overriding_configure_model(module):
            super().setup(trainer)
        optimizers = self.optimizers
        if trainer.state.fn != TrainerFn.FITTING:
            self.optimizers = []  # the optimizers of an earlier fit have the parameters of that fit
        self.restore_pending()
        metrics_to(module, self.root_device)
        self.optimizers = optimizers

    def _shard(self, module: pl.LightningModule) -> None:
        if any(isinstance(param, DTensor) for param in module.parameters()):
            return  # the user's own parallelism
        if self._tensor_parallel_size != 1:
            raise MisconfigurationException(
                f"`tensor_parallel_size={self._tensor_parallel_size}`, but no parameter is a DTensor: parallelize the"
                " module in `configure_model()`, or omit the argument."
            )
        check_modules(module, "zeroplus_fsdp")
        check_elements(module, "zeroplus_fsdp")
        if module.trainer.state.fn == TrainerFn.FITTING:
            check_memory(module, "zeroplus_fsdp", self.root_device)
        if module.trainer.state.fn != TrainerFn.FITTING:
            begin_alike(module, self.root_device)  # each rank keeps a part of what it has
        if isinstance(self.precision_plugin, DoublePrecision):
            self.precision_plugin.convert_module(module)  # before sharding: then units reduce in float64
        if self.activation_checkpointing is not None:
            _checkpoint_activations(module, self.activation_checkpointing)
        dtype = _PARAM_DTYPE[str(self.precision_plugin.precision)]
        policy: OffloadPolicy = OffloadPolicy()
        if self.offload:
            policy = CPUOffloadPolicy(pin_memory=self.root_device.type == "cuda")
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=self.reduce_dtype)
        self._originals = dict(module.named_parameters())
        # Under DDP, too, weights get other memory when they go to a GPU.
        kept = find_kept(module) if self.root_device.type == "cpu" else None
        for param in module.parameters():
            if not param.is_contiguous():
                param.data = param.data.contiguous()  # FSDP2 accepts no others, such as channels_last
        policies = {"mp_policy": mixed, "offload_policy": policy, "reshard_after_forward": self._reshards(module)}
        self._beside = _check(lambda: shard_children(module, self.wrap, self._shard_mesh, **policies))
        for name, param in module.named_parameters():
            if param is not self._originals[name]:
                original = self._originals[name]
                original.data = original.new_empty(0)  # frees its memory; its hooks and its identity stay
                self._sharded[name] = param
        stand_for_sharded(self.originals())
        if kept is not None:
            kept.take_leave()

    def _reshards(self, module: nn.Module) -> bool | None:
        """For ``fully_shard``: what the user has chosen, else whether whole weights are too large for the host."""
        if self.reshard_after_forward is not None or self.root_device.type != "cpu":
            return self.reshard_after_forward
        whole = sum(param.numel() * param.element_size() for param in module.parameters())
        fits = torch.tensor(int(whole * self.num_processes <= psutil.virtual_memory().available // _SPARE_SHARE))
        dist.all_reduce(fits, dist.ReduceOp.MIN)  # who keeps a weight takes part in no second gather
        return False if fits else None

    def _is_little(self, module: nn.Module) -> bool:
        """Whether gradients of micro-batches wait, as under Lightning's own strategy for FSDP2: on the CPU, if few.

        Not if units reduce in 16 bits, because FSDP2 would sum in 16 bits what waits.
        """
        sum_dtype = self.reduce_dtype or _PARAM_DTYPE[str(self.precision_plugin.precision)]
        if self.root_device.type != "cpu" or self.offload or sum_dtype not in (None, torch.float32):
            return False
        return sum(param.numel() for param in module.parameters() if param.requires_grad) <= _WAITING_ELEMENTS

    def originals(self) -> dict[Tensor, nn.Parameter]:
        """The original parameters, which are empty while sharded, by their sharded parameters."""
        module = self.lightning_module
        assert module is not None
        sharded: dict[str, Any] = dict(module.named_parameters())
        there = set(sharded.values())
        found: dict[Tensor, nn.Parameter] = {}
        for name, original in self._originals.items():
            param = sharded.get(name)
            if param is None and name in self._sharded and self._sharded[name] in there:
                param = self._sharded[name]  # under another name now, as `prune.remove` has it
            if param is not original and isinstance(param, DTensor):  # it may have left the module
                found[param] = original
        return found

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True
        super().on_exception(exception)

    def restore_module(self) -> None:
        """Turn the sharded module back into an ordinary one, on the CPU, as other strategies leave it.

        After an exception it stays sharded until the next fit: gathering needs all ranks, and another one may have
        ended.
        """
        module = self.lightning_module
        if module is None or not self._originals:
            return
        units = [*units_of(module), *self._beside]
        shard(units)
        if self._has_failed and dist.get_world_size() > 1:
            leave(self.originals())
            _left[module] = self
            return
        stand_for_themselves(self.originals())
        restore(module, units, self.originals(), dict.fromkeys([*self.optimizers, *self._adopted]))
        if self.activation_checkpointing is not None:
            unwrap_checkpointing(module)
        if self._layer_sync is not None and module.trainer.state.fn == TrainerFn.FITTING:
            self._layer_sync.revert(module)  # as DDP gives layers back
        module.cpu()
        self._originals, self._sharded, self._beside, self._adopted = {}, {}, [], []

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        for sharded, original in self.originals().items():
            sharded.__class__ = in_form(type(sharded), own_class(original))
            for name, value in vars(original).items():
                if not name.startswith(("_fsdp", "_sharded")):
                    setattr(sharded, name, value)  # such as `param.no_weight_decay`
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            check_states(optimizer, "zeroplus_fsdp")
            self._let_have_sharded(optimizer)
        assert self.lightning_module is not None
        check_groups(self.lightning_module, self.optimizers)

    def _let_have_sharded(self, optimizer: Optimizer) -> None:
        """Put sharded parameters into the groups of an optimizer that was made before the module was sharded."""
        sharded_by_original = {original: sharded for sharded, original in self.originals().items()}
        early = [param for group in optimizer.param_groups for param in group["params"] if param in sharded_by_original]
        if early and optimizer.state:
            raise MisconfigurationException(
                "`configure_optimizers` returned an optimizer of an earlier fit, whose states are of whole parameters."
                " Return a new one. To continue with its states, use `trainer.fit(ckpt_path=...)`."
            )
        for group in optimizer.param_groups if early else ():
            group["params"] = [sharded_by_original.get(param, param) for param in group["params"]]

    @override
    def model_to_device(self) -> None:
        if not self.offload:
            super().model_to_device()
            return
        assert self.model is not None
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.root_device))


#: What has left a module sharded.
_left: WeakKeyDictionary[nn.Module, ShardingFSDPStrategy] = WeakKeyDictionary()


def _check(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except ValueError as error:
        raise MisconfigurationException(str(error)) from error


def _checkpoint_activations(module: nn.Module, policy: WrapPolicy) -> None:
    predicate = make_predicate(policy, "activation_checkpointing")
    assert predicate is not None
    apply_activation_checkpointing(module, check_fn=lambda child: child is not module and predicate(child))


@contextmanager
def _overriding_configure_model(module: pl.LightningModule) -> Generator[None, None, None]:
    """Let ``configure_model`` count as overridden within, which the base class requires."""
    if is_overridden("configure_model", module):
        yield
        return
    object.__setattr__(module, "configure_model", lambda: None)
    try:
        yield
    finally:
        object.__delattr__(module, "configure_model")
