"""ZeroPlusFabricStrategy: the same engine under ``lightning.fabric.Fabric``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import ClusterEnvironment, Precision
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import _StrategyRegistry
from lightning.fabric.strategies.deepspeed import _validate_device_index_selection
from lightning.fabric.strategies.strategy import Strategy, _Sharded
from lightning.fabric.utilities.init import _EmptyInit
from lightning.fabric.utilities.seed import reset_seed
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zeroplus.engine.optimizer.chain import parts_of
from lightning_zeroplus.engine.optimizer.sharing import chain_of
from lightning_zeroplus.gradients.again import evaluating
from lightning_zeroplus.gradients.clip import Clip
from lightning_zeroplus.gradients.patches.step_hooks import users_step_hooks
from lightning_zeroplus.gradients.ranks.from_rank_0 import begin_alike
from lightning_zeroplus.gradients.ranks.several import LockstepGroup
from lightning_zeroplus.precision.conversions import computed_dtype, fabric_precision, scales_losses
from lightning_zeroplus.precision.zero import as_loss, part_of, stepped
from lightning_zeroplus.strategy.common.arguments import check_backend, check_positive, check_timeout
from lightning_zeroplus.strategy.common.probe import FABRIC, check_lightning
from lightning_zeroplus.strategy.common.process import quiet_deepspeed
from lightning_zeroplus.strategy.common.window import Coalesce, GradientWindow
from lightning_zeroplus.strategy.deepspeed.accelerator import (
    check_kernels,
    configure_checkpointing,
    join_process_group,
    select_deepspeed_accelerator,
)
from lightning_zeroplus.strategy.deepspeed.config import checks as config_checks
from lightning_zeroplus.strategy.deepspeed.config import settings as settings
from lightning_zeroplus.strategy.deepspeed.fabric_modules import (
    NoSync,
    OwnsEngines,
    are_frozen,
    engine_for,
    engine_of,
    move_inputs,
    refuse_other_optimizers,
)
from lightning_zeroplus.strategy.deepspeed.files.fabric_files import FabricFiles
from lightning_zeroplus.strategy.deepspeed.several import backward_of_several, chained

if TYPE_CHECKING:
    from lightning_zeroplus.engine.engine import ZeroPlusEngine
    from lightning_zeroplus.gradients.window_report import WindowReport


class ZeroPlusFabricStrategy(OwnsEngines, FabricFiles, _Sharded):
    """ZeRO stages 0 to 3 on CPU and CUDA for a loop of your own; any number of ``fabric.backward()`` per step.

    Registered with Fabric as ``zeroplus_stage0`` to ``zeroplus_stage3``, ``zeroplus_stage2_offload`` and
    ``zeroplus_stage3_offload``::

        fabric = Fabric(accelerator="cpu", devices=2, strategy="zeroplus_stage2")
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        with fabric.strategy.coalesce():  # one reduction for both
            fabric.backward(first_loss(model(x)))
            fabric.backward(second_loss(model(y)))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    Args:
        stage: As in :class:`~lightning_zeroplus.ZeroPlusStrategy`, and so are the next four.
        reduction: See there.
        accumulate_dtype: See there.
        offload: See there.
        config: See there.
        accelerator: Set by Fabric.
        parallel_devices: Set by Fabric.
        cluster_environment: Set by Fabric.
        precision: Set by Fabric from ``precision=``.
        process_group_backend: Backend of ``torch.distributed``; None chooses gloo on CPU, nccl on CUDA.
        timeout: Time limit of the process group's collectives.

    Raises:
        MisconfigurationException: For unknown or contradictory settings, naming the key.
    """

    DEEPSPEED_ENV_VAR = "PL_DEEPSPEED_CONFIG_PATH"

    def __init__(
        self,
        stage: int | None = None,
        reduction: Literal["auto", "backward", "step"] = "auto",
        accumulate_dtype: torch.dtype | str | None = None,
        offload: Literal["cpu"] | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        check_lightning(FABRIC)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision=precision,
            process_group_backend=check_backend(process_group_backend),
            timeout=check_timeout(timeout),
        )
        self._given = settings.resolve(stage, reduction, accumulate_dtype, offload, config, self.DEEPSPEED_ENV_VAR)
        self.stage, self.reduction, self.accumulate_dtype, self.bucket_buffers, self.config = self._given
        self._backward_sync_control = NoSync()
        self._engines = []
        self._evaluated = []
        self._lockstep = LockstepGroup()

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeroPlusFabricStrategy:
        return self  # a copy of a model that was set up belongs to the same ranks

    @property
    def precision(self) -> Precision:
        """The plugin; one that Fabric makes from ``precision=`` is replaced."""
        return super().precision

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        self._precision = fabric_precision(plugin)

    @property
    def _precision_name(self) -> str:
        return str(self.precision.precision)

    # -- set-up -----------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        assert self.accelerator is not None
        select_deepspeed_accelerator(self.accelerator)
        quiet_deepspeed()
        config_checks.check_double(self._precision_name, self.stage)
        config_checks.check(self._given.config, self._precision_name)
        self._check_io()
        check_kernels(self._precision_name, computed_dtype(self._precision_name))
        loss_scale = getattr(self.precision, "loss_scale", None)
        self.config = settings.completed(self._given.config, self._precision_name, self.root_device.type, loss_scale)
        super().setup_environment()

    @override
    def _setup_distributed(self) -> None:
        join_process_group(self, self._set_world_ranks, self._join_with_devices)

    def _join_with_devices(self) -> None:
        assert self.parallel_devices is not None
        _validate_device_index_selection(self.parallel_devices)  # DeepSpeed takes the local rank for the device
        reset_seed()
        self._set_world_ranks()
        self._init_deepspeed_distributed()

    def _init_deepspeed_distributed(self) -> None:
        """Make the process group; DeepSpeed reads the ranks in the environment."""
        import deepspeed

        assert self.cluster_environment is not None
        port = self.cluster_environment.main_port
        os.environ.update(
            MASTER_ADDR=self.cluster_environment.main_address,
            MASTER_PORT=str(port),
            RANK=str(self.global_rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
        )
        self._process_group_backend = self._get_process_group_backend()
        deepspeed.init_distributed(self._process_group_backend, distributed_port=port, timeout=self._timeout)

    @override
    def setup_module(self, module: nn.Module) -> ZeroPlusEngine:
        """Build an engine that has no optimizer, to evaluate a module."""
        from lightning_zeroplus.engine.build import build_engine

        begin_alike(module, self.root_device)
        config = settings.for_inference(self.config)
        engine = build_engine(module, None, config, device_index=self.root_device.index)
        move_inputs(engine, self.root_device)
        self._forget_destroyed()
        self._evaluated.append(engine)
        if self.world_size > 1:
            refuse_other_optimizers(engine, self)
        return engine

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Any:
        """Give an optimizer to the engine of a module that was set up before: its only one, or a further one.

        Raises:
            RuntimeError: If its parameters are not those of one module.
        """
        engine = engine_for(optimizer, [*self._engines, *self._evaluated])
        if engine.gradient_accumulation is not None:
            config_checks.check_optimizer(optimizer, self.stage, self._precision_name)
            return engine.replace_optimizers([*engine.shown_optimizers(), optimizer], "`fabric.setup_optimizers`")[-1]
        _, optimizers, _ = self.setup_module_and_optimizers(engine.module, [optimizer], anew=engine)
        self._evaluated.remove(engine)
        return optimizers[0]

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None, anew: ZeroPlusEngine | None = None
    ) -> tuple[ZeroPlusEngine, list[Any], Any]:
        """Build an engine, or ``anew`` again, of a module and its optimizers: one, or several."""
        from lightning_zeroplus.engine.build import build_engine

        # Further optimizers may be set up: each has to be one of several from the beginning.
        optimizer = chained(optimizers) if anew is None else chain_of(optimizers)
        config_checks.check_optimizer(optimizer, self.stage, self._precision_name)
        config_checks.check_masters(self.config, self._precision_name, optimizer)
        if anew is None:
            begin_alike(module, self.root_device)
        engine = build_engine(
            module,
            optimizer,
            settings.thawed(settings.with_sizes(self.config, module, self.root_device.type == "cpu")),
            lr_scheduler=scheduler,
            device_index=self.root_device.index,
            reduction=self.reduction,
            accumulate_dtype=self.accumulate_dtype,
            bucket_buffers=self.bucket_buffers,
            lockstep_group=self._lockstep,
            scales_losses=scales_losses(self._precision_name),
            anew=anew,
        )
        assert engine.gradient_accumulation is not None
        engine.gradient_accumulation.guard = GradientWindow(lambda: engine)
        move_inputs(engine, self.root_device)
        self._forget_destroyed()
        engine.meets_before_steps = True  # a rank may run a model between a backward and the step
        self._engines.append(engine)
        configure_checkpointing(self.config)
        return engine, engine.shown_optimizers(), engine.lr_scheduler

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager:
        """Around the making of a module: on its device, in its dtype, partitioned at stage 3."""
        return super().module_init_context(empty_init) if self.stage < 3 else self._partitioned_init(empty_init)

    @contextmanager
    def _partitioned_init(self, empty_init: bool | None) -> Iterator[None]:
        with self.precision.module_init_context(), self.module_sharded_context(), _EmptyInit(bool(empty_init)):
            yield

    @override
    def module_sharded_context(self) -> AbstractContextManager:
        """Around the making of a module; at stage 3 its parameters are partitioned as soon as they are there."""
        if self.stage < 3:
            return nullcontext()
        from lightning_zeroplus.engine.upstream.sharded_init import sharded_init

        offloaded = self.config["zero_optimization"].get("offload_param") or {}
        return sharded_init(settings.thawed(self.config), offloaded.get("device"))

    # -- training -------------------------------------------------------------------------------------------------

    def coalesce(
        self, backwards: int | None = None, max_bytes: int | None = None, model: nn.Module | None = None
    ) -> Coalesce[WindowReport]:
        """Reduce once for all ``fabric.backward()`` within; see :meth:`lightning_zeroplus.ZeroPlusStrategy.coalesce`.

        Args:
            backwards: The number of backwards.
            max_bytes: Bytes of gradient per rank that may wait.
            model: Which model, where several were set up.

        Raises:
            MisconfigurationException: If a number is not a positive integer.
            RuntimeError: If it is not clear which model is meant; else see there.
        """
        accumulation = self._engine_of(model).gradient_accumulation
        assert accumulation is not None
        return cast("GradientWindow[WindowReport]", accumulation.guard).coalesce(backwards, max_bytes)

    def _engine_of(self, model: nn.Module | None) -> ZeroPlusEngine:
        if model is None and len(self._engines) == 1:
            return self._engines[0]
        if model is None:
            raise RuntimeError(
                f"{len(self._engines)} models were set up with an optimizer: name one, as `coalesce(model=model)` or"
                " `grad_norm(model)`."
                if self._engines
                else "No model was set up to be trained: ZeRO needs it together with its optimizer. Call"
                " `model, optimizer = fabric.setup(model, optimizer)`."
            )
        engine = engine_of(model)
        if engine is not None and engine in self._engines:
            return engine
        raise RuntimeError(f"This {type(model).__name__} was not set up with `fabric.setup(model, optimizer)`.")

    @wraps(cast(Any, Strategy.backward))  # so that Fabric allows `loss.backward()`: see `ZeroPlusFabricPrecision`
    def backward(  # type: ignore[override]
        self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any
    ) -> None:
        """Differentiate ``tensor`` as ``torch.Tensor.backward`` would, for every model that it comes from."""
        given = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args, strict=False)) | kwargs
        loss = as_loss(tensor, given.pop("gradient", None))
        if module is None and not self._engines and are_frozen(self._evaluated):
            loss.backward(**given)  # to their inputs
        elif module is None and len(self._engines) > 1:
            backward_of_several(self._engines, loss, **given)
        else:
            self._engine_of(module).backward(loss, **given)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Run the closure, if any, then let the engine of ``optimizer`` step."""
        closure: Callable[[], Any] | None = kwargs.pop("closure", None)
        engine, part = self._stepped_by(optimizer)
        with users_step_hooks(engine, part, optimizer, closure):
            if closure is None:
                return engine.step(part=part, **kwargs)
            with torch.enable_grad():
                result = closure()
            with evaluating(parts_of(engine.basic_optimizer)[part or 0], result, closure):
                engine.step(part=part, **kwargs)
        return result

    @staticmethod
    def _stepped_by(optimizer: Any) -> tuple[ZeroPlusEngine, int | None]:
        optimizer = stepped(optimizer)
        return optimizer.gradient_accumulation.engine, part_of(optimizer)

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the global gradient: by its L2 norm in the next optimizer step, by another norm now.

        Reduces what waits, because the norm is asked for now.

        Args:
            module: Not used: the optimizer knows its engine.
            optimizer: The engine's, or one of several.
            max_norm: The largest norm.
            norm_type: As for ``torch.nn.utils.clip_grad_norm_``.
            error_if_nonfinite: Raise if the norm is NaN or infinite. Not in fp16, where the step is skipped then.

        Returns:
            The global norm of the averaged, unscaled gradient before clipping; a scalar, the same on all ranks.

        Raises:
            MisconfigurationException: For a ``max_norm`` that is not positive.
            RuntimeError: If the norm is not finite, and ``error_if_nonfinite``.
        """
        check_positive("max_norm", max_norm)
        (engine, part), norm_type = self._stepped_by(optimizer), float(norm_type)
        norm = engine.total_norm(part, norm_type)
        if error_if_nonfinite and not engine.has_loss_scale() and not bool(norm.isfinite()):
            raise RuntimeError(
                "The total norm of the gradients is not finite, so they cannot be clipped. To clip them all the same,"
                " pass `error_if_nonfinite=False`."
            )
        engine.clip_gradients(Clip(float(max_norm), "norm"), part, None if norm_type == 2.0 else norm)
        return norm

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        """Clamp every element of the averaged gradient in the next optimizer step."""
        check_positive("clip_val", clip_val)
        engine, part = self._stepped_by(optimizer)
        engine.clip_gradients(Clip(float(clip_val), "value"), part)

    def grad_norm(self, model: nn.Module | None = None) -> float | None:
        """See :meth:`lightning_zeroplus.ZeroPlusStrategy.grad_norm`."""
        from lightning_zeroplus.engine.engine import gradient_norm

        return gradient_norm(self._engine_of(model))

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Names are registered in :mod:`lightning_zeroplus.strategy.names`, not by Lightning's class scan."""
