"""ZeroPlusFSDPStrategy: FSDP2 for any LightningModule, with windows and deferred weight gradients."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import _StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_zeroplus.fsdp.drain import Drain
from lightning_zeroplus.fsdp.units import Units
from lightning_zeroplus.fsdp.whole.layout import gather
from lightning_zeroplus.fsdp.whole.parameters import WholeParameters
from lightning_zeroplus.fsdp.whole.tensor import WholeDTensor
from lightning_zeroplus.fsdp.wrap import WrapPolicy
from lightning_zeroplus.gradients.module_buffers import BufferBroadcast
from lightning_zeroplus.gradients.module_zero_grad import ModuleZeroGrad
from lightning_zeroplus.gradients.patches.specialize import generalize, specialize
from lightning_zeroplus.gradients.window_report import WindowReport
from lightning_zeroplus.internals.torch import FSDP, GRADIENTS, check_torch
from lightning_zeroplus.precision.convert import casting_real
from lightning_zeroplus.strategy.common.averaging import gather_for_averaging, restore
from lightning_zeroplus.strategy.common.batch_counts import ChecksEvaluation, check_same_number_of_batches
from lightning_zeroplus.strategy.common.launcher import ZeroPlusLauncher
from lightning_zeroplus.strategy.common.meeting import meeting_between_batches, pausing_in_windows
from lightning_zeroplus.strategy.common.modules import check_states
from lightning_zeroplus.strategy.common.process import time_limit_of_new_groups
from lightning_zeroplus.strategy.common.window import Coalesce, GradientWindow
from lightning_zeroplus.strategy.fsdp2.evaluations import local_backwards
from lightning_zeroplus.strategy.fsdp2.gradients import ReducesBeforeClipping, RoutedZeroGrad, ShardedGradients
from lightning_zeroplus.strategy.fsdp2.hooks import TellsOthers
from lightning_zeroplus.strategy.fsdp2.no_sync import ModuleNoSync
from lightning_zeroplus.strategy.fsdp2.sharding import ShardingFSDPStrategy
from lightning_zeroplus.weight_grads.convert import give_store
from lightning_zeroplus.weight_grads.store import WeightGradStore

if TYPE_CHECKING:
    import lightning.pytorch as pl


class ZeroPlusFSDPStrategy(TellsOthers, ShardingFSDPStrategy, ChecksEvaluation):
    """FSDP2 on CPU and CUDA; the LightningModule needs no change. Registered as ``zeroplus_fsdp``.

    Parameters, gradients and optimizer states are sharded over the devices. If a module calls ``fully_shard`` itself,
    in ``configure_model``, it keeps its units. Otherwise every child becomes a unit, and so do the modules within the
    children that ``wrap`` selects. ``fully_shard``: `Liang et al., 2024, TorchTitan
    <https://arxiv.org/abs/2410.06511>`_.

    Layers with deferred weight gradients (:func:`~lightning_zeroplus.defer_weight_grads`) defer in every
    ``training_step``. Right before a unit is reduced, its deferred gradients are computed, for all backwards since its
    last reduction.

    Args:
        wrap: Which modules become units: module classes; a number of parameters; or a function of a module. None:
            only the children of the LightningModule.
        reduction: When gradients are averaged over the devices. ``"backward"``: in every backward. ``"step"``: once per
            optimizer step, at the cost of a full gradient on every device until then. ``"auto"``: ``"backward"``.
            There is one exception, on the CPU: with ``accumulate_grad_batches`` up to 64 Mi elements of gradients wait
            for the last micro-batch, as under Lightning's ``ModelParallelStrategy``. They do not wait with ``offload``,
            or if units reduce in 16 bits. See also :meth:`coalesce`.
        reduce_dtype: The dtype in which gradients are accumulated and reduced; None: the dtype of computation.
        activation_checkpointing: Which modules are recomputed in the backward: module classes, or a function of a
            module. None: no modules.
        offload: ``"cpu"`` keeps parameters, gradients and optimizer states in host memory.
        shard_size: Number of devices over which a parameter is sharded. ``"auto"``: the number of devices divided by
            the other two sizes.
        replicate_size: Number of such groups (HSDP). Gradients are reduced within each group, then among the groups.
        tensor_parallel_size: Size of the mesh dimension ``"tensor_parallel"``, for modules that use it in
            ``configure_model``.
        save_distributed_checkpoint: Save a folder to which every rank writes its shard. False: a single file.
        save_frozen: As for :class:`~lightning_zeroplus.ZeroPlusStrategy`; False only with
            ``save_distributed_checkpoint=True``.
        save_async: As for ``ZeroPlusStrategy``; True only with ``save_distributed_checkpoint=True``.
        weight_grads: The store of deferred weight gradients; None makes one without a limit.
        process_group_backend: Backend of ``torch.distributed``; None: gloo on CPU, nccl on CUDA, both for offloading.
        timeout: Time limit of collectives; None: torch's default.
        reshard_after_forward: Shard the weights of a unit again after its forward, and gather them once more for the
            backward, as ``fully_shard`` means it. False: they stay whole until the backward. None: children of the
            LightningModule stay whole; so do the units within them on the CPU, if the whole weights of all processes
            of the host take an eighth of its free memory or less.

    Raises:
        MisconfigurationException: If an argument has an unsupported value, naming it.
        UnsupportedTorchError: If torch lacks something that the strategy relies on, although it is not public.
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
        save_frozen: bool = True,
        save_async: bool = False,
        weight_grads: WeightGradStore | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        reshard_after_forward: bool | None = None,
    ) -> None:
        check_torch(GRADIENTS + FSDP)
        if reduction not in ("auto", "backward", "step"):
            raise MisconfigurationException(f'`reduction` must be "auto", "backward" or "step", not {reduction!r}.')
        if weight_grads is not None and not isinstance(weight_grads, WeightGradStore):
            raise MisconfigurationException(
                f"`weight_grads` must be a `WeightGradStore` or None, not {weight_grads!r}."
            )
        super().__init__(
            wrap=wrap,
            reduce_dtype=reduce_dtype,
            activation_checkpointing=activation_checkpointing,
            offload=offload,
            shard_size=shard_size,
            replicate_size=replicate_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            save_frozen=save_frozen,
            save_async=save_async,
            process_group_backend=process_group_backend,
            timeout=timeout,
            reshard_after_forward=reshard_after_forward,
        )
        self.reduction = reduction
        self.weight_grads = weight_grads if weight_grads is not None else WeightGradStore()
        self.window: GradientWindow[WindowReport] = GradientWindow(self._sharded_gradients)
        self._gradients: ShardedGradients | None = None
        self._holds = False
        self._buffers: BufferBroadcast | None = None
        self._module_methods: list[ModuleZeroGrad | ModuleNoSync] = []
        self._drain: Drain | None = None
        self._averaging: list[Any] = []
        self._meetings = ExitStack()
        self._parameters: WholeParameters | None = None

    # -- set-up -----------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = ZeroPlusLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._close()
        self._averaging += gather_for_averaging(trainer, saves_parts=False)
        with casting_real(self.precision_plugin):
            super().setup(trainer)
        assert self.lightning_module is not None
        with time_limit_of_new_groups(self._timeout):
            if trainer.state.fn == TrainerFn.FITTING:
                self._watch(self.lightning_module)
            else:
                self._watch_weights(self.lightning_module)

    def _watch_weights(self, module: pl.LightningModule) -> None:
        """Let weights behave as whole ones in an evaluation, too; in inference mode torch has no view of a DTensor."""
        units = Units(module, self._beside)
        self._gradients = ShardedGradients(units, self.weight_grads, self.window, until_step=False)
        self._parameters = WholeParameters(units, [], self.originals(), self._gradients)

    def _watch(self, module: pl.LightningModule) -> None:
        units = Units(module, self._beside)
        if give_store(module, self.weight_grads):
            self._drain = Drain(units, self.weight_grads)
        until_step = self.reduction == "step" and not module.automatic_optimization
        self._holds = self.reduction == "step" or (self.reduction == "auto" and self._is_little(module))
        self._gradients = ShardedGradients(units, self.weight_grads, self.window, until_step)
        self._parameters = WholeParameters(units, self.optimizers, self.originals(), self._gradients)
        self.optimizers = self.optimizers
        specialize(self.precision_plugin, ReducesBeforeClipping, sharded_gradients=self._gradients)
        self._module_methods.append(ModuleZeroGrad(module, self._gradients.zero_grad))
        self._module_methods.append(ModuleNoSync(module, self.block_backward_sync))
        self._buffers = BufferBroadcast(module, self.root_device)

    @property
    def optimizers(self) -> list[Optimizer]:
        """What steps; during a fit others may be assigned."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        if self._gradients is not None and self._parameters is not None and optimizers:
            self._gradients.several = len(optimizers) > 1
            for each in optimizers:
                self._adopt(vars(each).get("_optimizer", each), self._gradients, self._parameters)
        # Lightning's wrappers inherit from the optimizer's class.
        ShardingFSDPStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]

    def _adopt(self, optimizer: Optimizer, gradients: ShardedGradients, parameters: WholeParameters) -> None:
        if isinstance(optimizer, RoutedZeroGrad):
            return
        if optimizer not in self.optimizers:  # assigned during the fit
            check_states(optimizer, "zeroplus_fsdp")
            self._let_have_sharded(optimizer)
            parameters.step_by(optimizer)
        specialize(optimizer, RoutedZeroGrad, sharded_gradients=gradients)
        self._adopted.append(optimizer)

    def _close(self) -> None:
        if self._drain is not None:
            self._drain.close()
            self._drain = None
        self.weight_grads.clear()
        if self._parameters is not None:
            self._parameters.close()
            self._parameters = None
        self._meetings.close()
        if self._gradients is not None:
            if self._has_failed:
                self._gradients.recover()
            self._gradients.close()
            self._gradients = self._buffers = None
            for optimizer in self._adopted:
                if isinstance(optimizer, RoutedZeroGrad):
                    generalize(optimizer, RoutedZeroGrad)
            if self._module_methods:
                generalize(self.precision_plugin, ReducesBeforeClipping)
            while self._module_methods:
                self._module_methods.pop().remove()

    @override
    def teardown(self) -> None:
        self._close()
        restore(self._averaging)
        self.restore_module()
        super().teardown()

    # -- training ---------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        super().on_train_start()
        check_same_number_of_batches(self, self.lightning_module.trainer)
        self._meetings.enter_context(meeting_between_batches(self.lightning_module.trainer))
        self._meetings.enter_context(pausing_in_windows(self.lightning_module.trainer))

    @override
    def _meeting(self) -> Any:
        return self._gradients

    def coalesce(self, backwards: int | None = None, max_bytes: int | None = None) -> Coalesce[WindowReport]:
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
            max_bytes: Bytes of gradient per device that may wait, in whole units. The other units are reduced in every
                backward.

        Returns:
            A context manager. Entering it returns a
            :class:`~lightning_zeroplus.gradients.window_report.WindowReport` of the waiting gradients.

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

        Lightning's own loop enters it for all micro-batches but the last. Unless their gradients wait (``reduction``),
        these reduce too, but not between replicas, if no hook sees what a parameter has accumulated.
        """
        assert self.lightning_module is not None
        gradients = self._sharded_gradients()
        assert self._buffers is not None
        with self._buffers.accumulating():
            reduces = self.lightning_module.automatic_optimization and not self._holds
            if reduces and not gradients.hooked:
                with gradients.intermediate():
                    yield
            else:
                with gradients.no_sync():
                    yield

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step. Layers that can defer leave their weight gradients in the store."""
        assert self._buffers is not None and self._parameters is not None and self.lightning_module is not None
        with self._buffers.training_step(self.lightning_module.automatic_optimization), self.weight_grads.defer():
            self._broadcast_buffers()
            result = super().training_step(*args, **kwargs)
        self.window.check_closed()
        if result is None or not self.lightning_module.automatic_optimization:
            self._parameters.shard()
        return result

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        # Gathered first: the source rank pickles `obj`, and has only its part of a sharded tensor.
        return super().broadcast(tree_map_only(WholeDTensor, gather, obj), src)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            return super().test_step(*args, **kwargs)

    @contextmanager
    def _evaluating(self) -> Generator[None, None, None]:
        self._broadcast_buffers()
        with ExitStack() as stack:
            if self._parameters is not None:
                stack.enter_context(self._parameters.evaluating())
            if self._gradients is not None and not torch.is_inference_mode_enabled():
                stack.enter_context(local_backwards(self._gradients))
            yield

    def _broadcast_buffers(self) -> None:
        if self._buffers is not None:
            self._buffers.before_forward()

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Differentiate. Before a unit reduces, its deferred weight gradients are computed."""
        gradients = self._sharded_gradients()
        self.window.before_backward()
        try:
            with self.weight_grads.defer(), gradients.backward():
                result = super().backward(closure_loss, optimizer, *args, **kwargs)
        except BaseException:
            gradients.recover()
            raise
        assert self._parameters is not None and self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            self._parameters.shard()
        return result

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

        assert self._parameters is not None
        try:
            with self._parameters.completed():
                return super().optimizer_step(optimizer, complete_gradients, model, **kwargs)
        except BaseException:
            self._parameters.end_step(optimizer)  # torch runs no hook after a step that raises
            raise

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Names are registered in :mod:`lightning_zeroplus.strategy.names`, not by Lightning's class scan."""
