"""From a LightningModule and its optimizers to an engine."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers, _MockOptimizer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zeroplus.gradients.dtype import expected_grad_dtype, user_set_grad_dtype
from lightning_zeroplus.precision.conversions import low_precision_dtype, scales_losses
from lightning_zeroplus.precision.zero import ZeroPlusPrecision
from lightning_zeroplus.strategy.common.modules import check_elements, check_groups, check_memory, check_modules
from lightning_zeroplus.strategy.common.process import time_limit_of_new_groups
from lightning_zeroplus.strategy.common.window import GradientWindow
from lightning_zeroplus.strategy.deepspeed.checkpoint import CheckpointingStrategy
from lightning_zeroplus.strategy.deepspeed.compilation import CompileOptions, regions
from lightning_zeroplus.strategy.deepspeed.config import checks as config_checks
from lightning_zeroplus.strategy.deepspeed.config import settings as settings
from lightning_zeroplus.strategy.deepspeed.kept import configuring_optimizers
from lightning_zeroplus.strategy.deepspeed.replaced import replaced
from lightning_zeroplus.strategy.deepspeed.several import IdleOptimizer, chained
from lightning_zeroplus.weights.listed import check_registered, list_all
from lightning_zeroplus.weights.partitioned import access

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_zeroplus.engine.engine import ZeroPlusEngine


class EngineStrategy(CheckpointingStrategy):
    """Lightning's DeepSpeed strategy on an engine of this package.

    Attributes:
        stage: See :class:`~lightning_zeroplus.ZeroPlusStrategy`.
        reduction: ``"auto"``, ``"backward"`` or ``"step"``.
        accumulate_dtype: See :class:`~lightning_zeroplus.ZeroPlusStrategy`.
        bucket_buffers: Number of reduction buckets that take turns.
        compile_options: How to compile; None: do not compile.
        window: The window that ``coalesce()`` opens.
    """

    stage: int
    reduction: Any
    accumulate_dtype: torch.dtype | None
    bucket_buffers: int
    compile_options: CompileOptions | None
    window: GradientWindow[Any]
    _schedulers: list[Any]
    _timeout: timedelta | None

    @override
    def init_deepspeed(self) -> None:
        assert self.lightning_module is not None
        assert isinstance(self.model, nn.Module)
        if self.lightning_module.trainer.training:
            self._initialize_deepspeed_train(self.model)
        else:
            self._initialize_deepspeed_inference(self.model)

    @override
    def _init_optimizers(self) -> tuple[Optimizer, Any]:
        assert self.lightning_module is not None
        with configuring_optimizers(self.lightning_module, self.stage, self.root_device):
            optimizers, self._schedulers = self._configured_optimizers()
        only = len(optimizers) == len(self._schedulers) == 1
        return chained(optimizers), self._schedulers[0] if only else None

    def _configured_optimizers(self) -> tuple[list[Optimizer], list[Any]]:
        assert self.lightning_module is not None
        optimizers, schedulers = _init_optimizers_and_lr_schedulers(self.lightning_module)
        check_groups(self.lightning_module, optimizers)
        if self.stage > 0 and any(isinstance(each, _MockOptimizer) for each in optimizers):
            # `configure_optimizers` returned None.
            trained = [param for param in self.lightning_module.parameters() if param.requires_grad]
            optimizers = [IdleOptimizer(trained)] if trained else optimizers
        return optimizers, schedulers

    @override
    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        self._schedulers = []
        super()._initialize_deepspeed_train(model)
        engine: Any = self.model
        if hasattr(engine, "shown_optimizers"):  # ours
            self.optimizers = engine.shown_optimizers()
        if len(self._schedulers) > 1 or len(self.optimizers) > 1:
            self.lr_scheduler_configs = self._schedulers  # Lightning steps them; the engine has no scheduler

    @override
    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[ZeroPlusEngine, Optimizer]:
        from lightning_zeroplus.engine.build import build_engine
        from lightning_zeroplus.engine.optimizer.chain import parts_of

        assert isinstance(self.config, dict)
        precision = str(cast(Any, self.precision_plugin).precision)
        config_checks.check_optimizer(optimizer, self.stage, precision)
        config_checks.check_masters(self.config, precision, optimizer)
        if self.stage > 0:
            check_modules(model, f"ZeRO stage {self.stage}")
            check_memory(model, f"ZeRO stage {self.stage}", self.root_device)
        if self.stage == 3:
            check_elements(model, "ZeRO stage 3")
        list_all(model)
        check_registered(model, filter(None, parts_of(optimizer)))
        self.note_parameter_groups(model, optimizer)
        keeps_whole = self.root_device.type == "cpu" and self.compile_options is None
        self.config = settings.with_sizes(self.config, model, keeps_whole)
        grad_dtypes = self._grad_dtypes(model)
        engine = build_engine(
            model,
            optimizer,
            settings.thawed(self.config),
            lr_scheduler=lr_scheduler,
            device_index=self.root_device.index,
            reduction=self.reduction,
            accumulate_dtype=self.accumulate_dtype,
            grad_dtypes=grad_dtypes,
            bucket_buffers=self.bucket_buffers,
            scales_losses=scales_losses(precision),
        )
        scaler = cast(ZeroPlusPrecision, self.precision_plugin).scaler
        if scaler is not None and engine.loss_scaler is not None:
            scaler.follow(engine.loss_scaler)
        accumulation = engine.gradient_accumulation
        assert accumulation is not None and self.lightning_module is not None
        accumulation.guard = self.window
        if self.lightning_module.automatic_optimization:
            # Lightning's loop announces the last micro-batch, which then reduces overlapped with its backward.
            accumulation.expect_announcement()
        if self.compile_options is not None:
            backend, schedule, dynamic = self.compile_options
            engine.compile(backend, {"dynamic": dynamic}, schedule, list(regions(model)))
        return engine, engine.optimizer

    def _grad_dtypes(self, model: nn.Module) -> dict[str, torch.dtype | None]:
        """Resolve per-parameter gradient dtypes; may widen the config's gradient partitions to fp32."""
        precision = cast(ZeroPlusPrecision, self.precision_plugin)
        assert isinstance(self.config, dict)
        if precision.accumulates_in_fp32:
            if self.accumulate_dtype is not None:
                raise MisconfigurationException(
                    "`accumulate_dtype` is given to `ZeroPlusStrategy` and to `ZeroPlusPrecision`. Give it once."
                )
            settings.resolve_accumulate_dtype(torch.float32, self.config)
        low = low_precision_dtype(str(precision.precision))
        params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        named = precision.grad_dtypes(model)
        wishes = {name: expected_grad_dtype(param) for name, param in params.items() if user_set_grad_dtype(param, low)}
        asked = {**wishes, **named}
        if low is None or all(dtype is not None and dtype.itemsize <= low.itemsize for dtype in asked.values()):
            return named
        if "grad_accum_dtype" not in self.config.get("data_types", {}) and self.accumulate_dtype is None:
            self.config = settings.with_fp32_gradients(self.config, self.stage)
            # All partitions are fp32 then. Keep the gradients of the other parameters in low precision.
            named = {**{name: low for name in params if name not in asked}, **named}
        return named

    @property
    def optimizers(self) -> list[Optimizer]:
        """What the user steps. During a fit others can take their place: a collective, which makes new partitions."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        if optimizers and self._has_optimizers():
            check = partial(
                config_checks.check_optimizer,
                stage=self.stage,
                precision=str(cast(Any, self.precision_plugin).precision),
            )
            optimizers = replaced(self.model, self._lightning_optimizers, optimizers, check)
        CheckpointingStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        if not self._has_optimizers():
            super().setup_optimizers(trainer)
            return
        self.optimizers, self.lr_scheduler_configs = self._configured_optimizers()

    def _has_optimizers(self) -> bool:
        """Whether a fit is running, with an engine and its optimizers."""
        engine: Any = getattr(self, "model", None)
        return getattr(engine, "gradient_accumulation", None) is not None and not engine.destroyed

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Surround the construction of modules. At stage 3 a new module's parameters are partitioned at once."""
        with time_limit_of_new_groups(self._timeout), ExitStack() as stack:
            if self.stage == 3:
                from lightning_zeroplus.engine.upstream.sharded_init import sharded_init

                self._init_config_if_needed()
                stack.enter_context(sharded_init(settings.thawed(self.config), self.remote_device))
            yield
        if self.stage == 3 and self.lightning_module is not None:
            access.install(self.lightning_module)

    @override
    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        from lightning_zeroplus.engine.build import build_engine

        assert isinstance(self.config, dict)
        config = settings.for_inference(self.config)
        self.model = build_engine(model, None, config, device_index=self.root_device.index)

    @override
    def _format_config(self) -> None:
        assert isinstance(self.config, dict)
        plugin = cast(ZeroPlusPrecision, self.precision_plugin)
        self.config = settings.completed(self.config, plugin.precision, self.root_device.type, plugin.loss_scale)
