"""ZeroPlusFSDPStrategy: FSDP2 for any LightningModule, with windows and deferred weight gradients."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import _StrategyRegistry
from lightning.fabric.utilities.init import _materialize_distributed_module
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

from lightning_zeroplus.engine.buffers import BufferBroadcast
from lightning_zeroplus.engine.deferred import Deferred
from lightning_zeroplus.engine.module_zero_grad import ModuleZeroGrad
from lightning_zeroplus.engine.specialize import specialize
from lightning_zeroplus.fsdp.convert import attach
from lightning_zeroplus.fsdp.drain import Drain
from lightning_zeroplus.fsdp.store import WeightGradStore
from lightning_zeroplus.fsdp.units import Units
from lightning_zeroplus.fsdp.wrap import WrapPolicy, make_predicate, shard_children
from lightning_zeroplus.strategy.arguments import check_backend, check_bool, check_timeout
from lightning_zeroplus.strategy.fsdp_checkpoint import CheckpointingFSDPStrategy
from lightning_zeroplus.strategy.fsdp_gradients import ReducesBeforeClipping, RoutedZeroGrad, ShardedGradients
from lightning_zeroplus.strategy.launcher import ZeroPlusLauncher
from lightning_zeroplus.strategy.lengths import check_same_number_of_batches
from lightning_zeroplus.strategy.process import time_limit_of_new_groups
from lightning_zeroplus.strategy.window import Coalesce, GradientWindow

if TYPE_CHECKING:
    import lightning.pytorch as pl

#: The dtype in which FSDP2 gathers and computes, by the Trainer's precision; None: that of the parameters.
_PARAM_DTYPE: dict[str, torch.dtype | None] = {
    "32-true": None,
    "bf16-true": None,
    "16-true": None,
    "bf16-mixed": torch.bfloat16,
}


class ZeroPlusFSDPStrategy(CheckpointingFSDPStrategy):
    """FSDP2 on CPU and CUDA, for LightningModules that know nothing of it. Registered as ``zeroplus_fsdp``.

    Parameters, gradients and optimizer states are sharded over the devices. A module that calls ``fully_shard`` itself,
    in ``configure_model``, keeps its units; otherwise every child becomes one, and within the children what ``wrap``
    says. ``fully_shard``: `Liang et al., 2024, TorchTitan <https://arxiv.org/abs/2410.06511>`_.

    Layers with deferred weight gradients (:func:`~lightning_zeroplus.defer_weight_grads`) defer in every
    ``training_step``; a unit's are computed right before the unit is reduced, for all backwards since the last time.

    Args:
        wrap: What becomes a unit of its own: module classes; a number of parameters; or a function of a module. None:
            only the children of the LightningModule.
        reduction: When gradients are averaged over the devices. ``"backward"``: in every backward. ``"step"``: once per
            optimizer step, at the cost of a full gradient on every device until then. ``"auto"``: ``"backward"``. See
            also :meth:`coalesce`.
        reduce_dtype: The dtype in which gradients are accumulated and reduced; None: that of computation.
        activation_checkpointing: What is recomputed in the backward: module classes, or a function of a module. None:
            nothing.
        offload: ``"cpu"`` keeps parameters, gradients and optimizer states in host memory.
        shard_size: Over how many devices a parameter is sharded. ``"auto"``: all that the other sizes leave.
        replicate_size: How many such groups there are (HSDP): gradients are reduced within, then among them.
        tensor_parallel_size: Size of the mesh dimension ``"tensor_parallel"``, for modules that use it in
            ``configure_model``.
        save_distributed_checkpoint: Save a folder to which every rank writes its shard. False: a single file.
        weight_grads: The store of deferred weight gradients; None makes one without a limit.
        process_group_backend: Backend of ``torch.distributed``; None: gloo on CPU, nccl on CUDA, both for offloading.
        timeout: Time limit of collectives.

    Raises:
        MisconfigurationException: For an argument that has no meaning, naming it.
    """

    strategy_name = "zeroplus_fsdp"

    def __init__(
        self,
        wrap: WrapPolicy | None = None,
        reduction: Literal["auto", "backward", "step"] = "auto",
        reduce_dtype: torch.dtype | None = torch.float32,
        activation_checkpointing: WrapPolicy | None = None,
        offload: Literal["cpu"] | None = None,
        shard_size: int | Literal["auto"] = "auto",
        replicate_size: int = 1,
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
        weight_grads: WeightGradStore | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        for name, policy in (("wrap", wrap), ("activation_checkpointing", activation_checkpointing)):
            _check(lambda name=name, policy=policy: make_predicate(policy, name))  # type: ignore[misc]
        if isinstance(activation_checkpointing, int):
            raise MisconfigurationException(
                f"`activation_checkpointing={activation_checkpointing!r}`: give module classes or a function of one."
            )
        if reduction not in ("auto", "backward", "step"):
            raise MisconfigurationException(f'`reduction` must be "auto", "backward" or "step", not {reduction!r}.')
        if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
            raise MisconfigurationException(f"`reduce_dtype` must be a floating-point dtype or None: {reduce_dtype!r}.")
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
        if weight_grads is not None and not isinstance(weight_grads, WeightGradStore):
            raise MisconfigurationException(
                f"`weight_grads` must be a `WeightGradStore` or None, not {weight_grads!r}."
            )
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=check_backend(process_group_backend),
            timeout=check_timeout(timeout),
        )
        self.wrap = wrap
        self.reduction: Literal["backward", "step"] = "step" if reduction == "step" else "backward"
        self.reduce_dtype = reduce_dtype
        self.activation_checkpointing = activation_checkpointing
        self.offload = offload
        self.shard_size = shard_size
        self.replicate_size = replicate_size
        self.weight_grads = weight_grads if weight_grads is not None else WeightGradStore()
        self.window: GradientWindow[Deferred] = GradientWindow(self._sharded_gradients)
        self._gradients: ShardedGradients | None = None
        self._buffers: BufferBroadcast | None = None
        self._module_zero_grad: ModuleZeroGrad | None = None
        self._drain: Drain | None = None

    # -- set-up -----------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = ZeroPlusLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

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
            self._process_group_backend = "cpu:gloo,cuda:nccl"  # gloo reduces the norm of gradients in host memory
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
        mesh["replicate", "shard"]._flatten("data_parallel")  # what Lightning's sampler asks for
        return mesh

    @property
    def _shard_mesh(self) -> DeviceMesh:
        return self.device_mesh["replicate", "shard"] if self.replicate_size > 1 else self.device_mesh["data_parallel"]

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        self._close()
        if not any(isinstance(each, FSDPModule) for each in module.modules()):
            self._shard(module)
        if self.offload:
            _materialize_distributed_module(module, torch.device("cpu"))
        with _overriding_configure_model(module):
            super().setup(trainer)
        self.restore_pending()
        if trainer.state.fn == TrainerFn.FITTING:
            self._watch(module)

    def _shard(self, module: pl.LightningModule) -> None:
        if any(isinstance(param, DTensor) for param in module.parameters()):
            return  # the user's own parallelism
        if self._tensor_parallel_size != 1:
            raise MisconfigurationException(
                f"`tensor_parallel_size={self._tensor_parallel_size}`, but no parameter is a DTensor: parallelize the"
                " module in `configure_model()`, or leave the size out."
            )
        if self.activation_checkpointing is not None:
            _checkpoint_activations(module, self.activation_checkpointing)
        dtype = _PARAM_DTYPE[str(self.precision_plugin.precision)]
        policy: OffloadPolicy = OffloadPolicy()
        if self.offload:
            policy = CPUOffloadPolicy(pin_memory=self.root_device.type == "cuda")
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=self.reduce_dtype)
        _check(lambda: shard_children(module, self.wrap, mesh=self._shard_mesh, mp_policy=mixed, offload_policy=policy))

    def _watch(self, module: pl.LightningModule) -> None:
        units = Units(module)
        if attach(module, self.weight_grads):
            self._drain = Drain(units, self.weight_grads)
        until_step = self.reduction == "step" and not module.automatic_optimization
        self._gradients = ShardedGradients(units, self.weight_grads, self.window, until_step)
        for optimizer in self.optimizers:
            specialize(optimizer, RoutedZeroGrad, sharded_gradients=self._gradients)
        self.optimizers = self.optimizers  # Lightning's wrappers inherit from the optimizer's class
        specialize(self.precision_plugin, ReducesBeforeClipping, sharded_gradients=self._gradients)
        self._module_zero_grad = ModuleZeroGrad(module, self._gradients.zero_grad)
        self._buffers = BufferBroadcast(module, self.root_device)

    @override
    def model_to_device(self) -> None:
        if not self.offload:
            super().model_to_device()
            return
        assert self.model is not None
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.root_device))

    def _close(self) -> None:
        if self._drain is not None:
            self._drain.close()
            self._drain = None
        self.weight_grads.clear()
        if self._gradients is not None:
            self._gradients = self._buffers = None
            assert self._module_zero_grad is not None
            self._module_zero_grad.remove()
            plugin: Any = self.precision_plugin
            plugin.__class__ = type(plugin).__mro__[2]  # undo specialize()

    @override
    def teardown(self) -> None:
        self._close()
        super().teardown()

    # -- training ---------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        super().on_train_start()
        check_same_number_of_batches(self, self.lightning_module.trainer)

    def coalesce(self, backwards: int | None = None, max_bytes: int | None = None) -> Coalesce[Deferred]:
        """Reduce once for all backwards within, in manual optimization.

        ::

            with self.trainer.strategy.coalesce():
                for chunk in chunks:
                    self.manual_backward(self.loss(chunk))
            optimizer.step()

        As :meth:`lightning_zeroplus.ZeroPlusStrategy.coalesce`. Deferred weight gradients wait as well, and are
        computed before their unit is reduced. An exception in the window drops every gradient since the last step.

        Args:
            backwards: The number of backwards. The last one reduces each unit as soon as its gradients are complete.
            max_bytes: Bytes of gradient per device that may wait, in whole units; the others are reduced in every
                backward.

        Returns:
            A context manager; entering it gives a :class:`~lightning_zeroplus.engine.deferred.Deferred`, which says
            what waits.

        Raises:
            MisconfigurationException: If an argument is not a positive integer.
            RuntimeError: As for ``ZeroPlusStrategy``.
        """
        return self.window.coalesce(backwards, max_bytes)

    def _sharded_gradients(self) -> ShardedGradients:
        if self._gradients is None:
            raise RuntimeError("coalesce() and block_backward_sync() work during fit only.")
        return self._gradients

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Only accumulate within, as under DDP.

        Lightning's own loop opens it for all micro-batches but the last; ``reduction="backward"`` reduces these, too.
        """
        assert self.lightning_module is not None
        gradients = self._sharded_gradients()
        assert self._buffers is not None
        with self._buffers.accumulating():
            if self.lightning_module.automatic_optimization and self.reduction == "backward":
                yield
            else:
                with gradients.no_sync():
                    yield

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; layers that can will leave their weight gradients in the store."""
        self._broadcast_buffers()
        with self.weight_grads.defer():
            result = super().training_step(*args, **kwargs)
        self.window.check_closed()
        return result

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._broadcast_buffers()
        return super().validation_step(*args, **kwargs)

    def _broadcast_buffers(self) -> None:
        if self._buffers is not None:
            self._buffers.before_forward()

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Differentiate; units that reduce take their weight gradients from the store."""
        gradients = self._sharded_gradients()
        self.window.before_backward()
        try:
            with self.weight_grads.defer():
                return super().backward(closure_loss, optimizer, *args, **kwargs)
        except BaseException:
            gradients.recover()
            raise

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        def complete_gradients() -> Any:
            result = closure()
            self._sharded_gradients().complete("optimizer.step()")
            return result

        return super().optimizer_step(optimizer, complete_gradients, model, **kwargs)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Names are registered in :mod:`lightning_zeroplus.strategy.names`, not by Lightning's class scan."""


def _check(function: Callable[[], Any]) -> None:
    try:
        function()
    except ValueError as error:
        raise MisconfigurationException(str(error)) from error


def _checkpoint_activations(module: nn.Module, policy: WrapPolicy) -> None:
    predicate = make_predicate(policy, "activation_checkpointing")
    assert predicate is not None
    apply_activation_checkpointing(module, check_fn=lambda child: child is not module and predicate(child))


@contextmanager
def _overriding_configure_model(module: pl.LightningModule) -> Generator[None, None, None]:
    """Let the base class, which insists on it, find ``configure_model`` overridden."""
    if is_overridden("configure_model", module):
        yield
        return
    object.__setattr__(module, "configure_model", lambda: None)
    try:
        yield
    finally:
        object.__delattr__(module, "configure_model")
