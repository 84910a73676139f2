"""ZeroPlusStrategy: Lightning's DeepSpeed strategy on an engine for any number of backwards per step."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import _StrategyRegistry
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, ParallelStrategy
from torch import nn
from torch.utils._pytree import tree_map
from typing_extensions import override

from lightning_zeroplus.engine.upstream.jit_locks import watch_jit_locks
from lightning_zeroplus.precision.conversions import computed_dtype
from lightning_zeroplus.precision.zero import part_of, trainer_precision
from lightning_zeroplus.strategy.common.arguments import check_backend, check_timeout
from lightning_zeroplus.strategy.common.averaging import gather_for_averaging, restore
from lightning_zeroplus.strategy.common.batch_counts import ChecksEvaluation, check_same_number_of_batches
from lightning_zeroplus.strategy.common.launcher import ZeroPlusLauncher
from lightning_zeroplus.strategy.common.meeting import MeetsOthers, meeting_between_batches, pausing_in_windows
from lightning_zeroplus.strategy.common.probe import TRAINER, check_lightning
from lightning_zeroplus.strategy.common.process import quiet_deepspeed, time_limit_of_new_groups
from lightning_zeroplus.strategy.common.window import Coalesce, GradientWindow
from lightning_zeroplus.strategy.deepspeed.accelerator import (
    check_kernels,
    join_process_group,
    select_deepspeed_accelerator,
)
from lightning_zeroplus.strategy.deepspeed.allowed_callbacks import allow, forbid_again
from lightning_zeroplus.strategy.deepspeed.compilation import CompileOptions, resolve_compile, take_over
from lightning_zeroplus.strategy.deepspeed.config import checks as config_checks
from lightning_zeroplus.strategy.deepspeed.config import settings as settings
from lightning_zeroplus.strategy.deepspeed.engine_strategy import EngineStrategy
from lightning_zeroplus.weights.partitioned.access import whole
from lightning_zeroplus.weights.partitioned.ordinary import keep_process

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_zeroplus.engine.engine import ZeroPlusEngine
    from lightning_zeroplus.gradients.window_report import WindowReport


class ZeroPlusStrategy(MeetsOthers, EngineStrategy, ChecksEvaluation):
    """ZeRO stages 0 to 3 on CPU and CUDA. If your loop is correct under DDP, it is correct here.

    Registered as ``zeroplus_stage0`` to ``zeroplus_stage3``, ``zeroplus_stage2_offload``, ``zeroplus_stage3_offload``,
    and ``zeroplus_stage1_compile`` to ``zeroplus_stage3_compile``. ZeRO: `Rajbhandari et al., 2020
    <https://arxiv.org/abs/1910.02054>`_.

    Args:
        stage: What is sharded over the ranks. 0: nothing (plain all-reduce); 1: optimizer states; 2: also gradients;
            3: also parameters. None takes the stage of ``config``, else 3.
        reduction: When gradients are averaged over the ranks. ``"backward"``: in every backward. ``"step"``: once
            per optimizer step, at stages 2 and 3 at the cost of a full gradient on every rank until then. ``"auto"``:
            ``"step"`` at stages 0 and 1, where it costs no memory, and on the CPU at stages 2 and 3 if all gradients
            fit into four buckets of ``reduce_bucket_size`` elements (by default up to 64 Mi elements). Otherwise, and
            with ``offload`` or ``overlap_comm``, ``"backward"``. All are correct for any number of backwards. See also
            :meth:`coalesce`.
        accumulate_dtype: ``torch.float32`` (or ``"float32"``) sums, reduces and stores the gradients of bf16 or fp16
            parameters in fp32. ``config["communication_data_type"]`` may still set a lower precision for reductions.
            None: ``config["data_types"]["grad_accum_dtype"]``, else the parameters' dtype.
        offload: ``"cpu"`` keeps optimizer states, and at stage 3 parameters, in host memory.
        compile: Compile each child of the LightningModule with DeepCompile, at stages 1 to 3; ``training_step`` runs in
            Python. True, or a dict with some of ``backend`` (``"inductor"`` or ``"eager"``), ``schedule`` (pairs of an
            optimizer step and a list of DeepCompile's passes), and ``dynamic`` (as in ``torch.compile``). A module that
            was compiled with ``torch.compile`` is compiled with DeepCompile instead.
        config: A DeepSpeed config (dict or path of a JSON file), merged over the defaults; your settings win. None
            reads the file that the environment variable ``PL_DEEPSPEED_CONFIG_PATH`` names, if any. The additional
            section ``{"zeroplus": {"bucket_buffers": 4}}`` sets how many reduction buckets take turns at stages 1 and 2
            with ``overlap_comm``. With two, the default, only the filling of one bucket overlaps with communication.
        save_frozen: Save frozen weights, too. False: checkpoints have fingerprints of the frozen weights that have not
            changed since the fit began, instead of the weights. A fit resumes from them only if its model has the same.
        save_async: During a fit, copy a checkpoint to host memory and write it while the training goes on. A save that
            failed raises an error on all ranks in the next save, or at the end of the fit.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        precision_plugin: Set by the Trainer from ``precision=``.
        process_group_backend: Backend of ``torch.distributed``; None: gloo on CPU, nccl on CUDA.
        timeout: Time limit of collectives, in every process group that the strategy makes; None: torch's default. A
            vanished or hung rank ends the job after this time. When a job starts, the ranks wait for each other as
            long.

    Raises:
        MisconfigurationException: If settings are unknown or contradict each other, naming the key.
    """

    strategy_name = "zeroplus"

    def __init__(
        self,
        stage: int | None = None,
        reduction: Literal["auto", "backward", "step"] = "auto",
        accumulate_dtype: torch.dtype | str | None = None,
        offload: Literal["cpu"] | None = None,
        compile: bool | Mapping[str, Any] = False,
        config: Mapping[str, Any] | str | Path | None = None,
        save_frozen: bool = True,
        save_async: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        check_lightning(TRAINER)
        # Not DeepSpeedStrategy.__init__: it imports DeepSpeed, which would fix its accelerator before the Trainer picks
        # one. The attributes that it would set, other than from its own arguments, are set here.
        super(DeepSpeedStrategy, self).__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=check_backend(process_group_backend),
            timeout=check_timeout(timeout),
        )
        self._given = settings.resolve(stage, reduction, accumulate_dtype, offload, config, self.DEEPSPEED_ENV_VAR)
        self.stage, self.reduction, self.accumulate_dtype, self.bucket_buffers, self.config = self._given
        self._set_saves(save_frozen, save_async)
        self._given_compile = self.compile_options = resolve_compile(compile, self.stage)
        self._compiled_modules: WeakKeyDictionary[nn.Module, CompileOptions] = WeakKeyDictionary()
        self.window = GradientWindow(self._engine)
        self._adapted = ExitStack()  # what a fit changes outside of its module
        self._schedulers: list[Any] = []
        self._config_initialized = False
        self.remote_device = (self.config["zero_optimization"].get("offload_param") or {}).get("device")
        self.load_full_weights = self.exclude_frozen_parameters = False

    # -- what the Trainer sets ------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """The plugin. One of Lightning's, which the Trainer makes from ``precision=``, is replaced."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = trainer_precision(plugin)

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning's loop decides when to step, as under DDP, also at the end of an epoch."""
        return False

    def __setattr__(self, name: str, value: Any) -> None:
        # The Trainer sets the module here, before it checks whether the strategy supports a compiled one. No property:
        # Lightning reads the module some forty times per batch.
        if name == "_lightning_module" and value is not None:
            options = take_over(value)
            if options is not None:
                self._compiled_modules[value] = options
            # The Trainer sets the module several times, and after take_over() it does not show that it was compiled.
            options = self._compiled_modules.get(value)
            self.compile_options = self._given_compile or (options and resolve_compile(options._asdict(), self.stage))
        super().__setattr__(name, value)

    # -- set-up -----------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = ZeroPlusLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        assert self.accelerator is not None
        select_deepspeed_accelerator(self.accelerator)
        quiet_deepspeed()
        precision = str(self.precision_plugin.precision)
        config_checks.check_double(precision, self.stage)
        check_kernels(precision, computed_dtype(precision))
        # From the arguments again: the last fit completed the config for its own model and precision.
        self.config, self._config_initialized = self._given.config, False
        config_checks.check(self.config, precision)
        self._adapted.enter_context(keep_process())
        if self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            config_checks.check_clipping(self.config, trainer.gradient_clip_val)
            self._adapted.callback(restore, gather_for_averaging(trainer, saves_parts=True))
            self._adapted.callback(forbid_again, allow(trainer))
        ParallelStrategy.setup_environment(self)
        self.setup_distributed()

    @override
    def setup_distributed(self) -> None:
        join_process_group(self, self.set_world_ranks, super().setup_distributed)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        with watch_jit_locks(is_local_leader=self.local_rank == 0), time_limit_of_new_groups(self._timeout):
            super().setup(trainer)

    @override
    def teardown(self) -> None:
        engine: Any = self.model
        with self._adapted:
            if hasattr(engine, "kept_slots"):  # ours
                engine.close(whole=not self._has_failed)
        super().teardown()
        self.config = self._given.config  # drop what was completed for this fit

    # -- training -------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        super().on_train_start()
        check_same_number_of_batches(self, self.lightning_module.trainer)
        if self.stage == 3:
            self._adapted.enter_context(meeting_between_batches(self.lightning_module.trainer))
        self._adapted.enter_context(pausing_in_windows(self.lightning_module.trainer))

    @override
    def _check_evaluation(self) -> None:
        if self.stage == 3:  # a forward gathers weights
            super()._check_evaluation()

    def coalesce(self, backwards: int | None = None, max_bytes: int | None = None) -> Coalesce[WindowReport]:
        """Reduce once for all backwards within, in manual optimization.

        ::

            with self.trainer.strategy.coalesce():
                for chunk in chunks:
                    self.manual_backward(self.loss(chunk))
            optimizer.step()

        The full local gradient stays on every rank until the window ends. Under ``reduction="step"`` it stays until the
        step, which reduces all windows together. An exception in the window drops every gradient since the last step,
        and propagates at once, without a collective.

        Args:
            backwards: The number of backwards. The last one reduces in upstream's hooks, overlapped with its compute
                (stages 2 and 3), and frees each gradient as it goes.
            max_bytes: Bytes of gradient per rank that may wait; parameters beyond it are reduced in every backward.
                Ignored at stage 0, where every rank has the whole gradient anyway.

        Returns:
            A context manager. Entering it returns a
            :class:`~lightning_zeroplus.gradients.window_report.WindowReport` of the waiting gradients.

        Raises:
            MisconfigurationException: If an argument is not a positive integer.
            RuntimeError: At the end, if there were not ``backwards`` backwards; inside, for another ``coalesce()``, for
                ``optimizer.step()``, and for ``optimizer.zero_grad()`` after a backward.
        """
        return self.window.coalesce(backwards, max_bytes)

    def _engine(self) -> ZeroPlusEngine:
        from lightning_zeroplus.engine.engine import ZeroPlusEngine

        if not isinstance(self.model, ZeroPlusEngine) or self.model.gradient_accumulation is None:
            raise RuntimeError("coalesce() and block_backward_sync() work during fit only.")
        return self.model

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        from lightning_zeroplus.engine.engine import ZeroPlusEngine

        assert self.lightning_module is not None
        buffers = self.model.buffers if isinstance(self.model, ZeroPlusEngine) else None
        with nullcontext() if buffers is None else buffers.training_step(self.lightning_module.automatic_optimization):
            result = super().training_step(*args, **kwargs)
        self.window.check_closed()
        return result

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        # Gathered first: the source rank pickles `obj`, and has only its part of a partitioned weight.
        return super().broadcast(tree_map(partial(whole, name="strategy.broadcast"), obj), src)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.end_reading()
        accumulation = getattr(self.model, "gradient_accumulation", None)
        with nullcontext() if accumulation is None else accumulation.evaluating():
            return super().validation_step(*args, **kwargs)

    @override
    def end_reading(self) -> None:
        from lightning_zeroplus.engine.engine import ZeroPlusEngine

        if isinstance(self.model, ZeroPlusEngine) and self.model.gradient_accumulation is not None:
            self.model.gradient_accumulation.end_reading()

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Only accumulate within, as under DDP.

        Lightning's own loop enters it for all micro-batches but the last. With ``reduction="backward"`` these reduce
        too, unless hooks see what a parameter has accumulated.
        """
        assert self.lightning_module is not None
        engine = self._engine()
        assert engine.gradient_accumulation is not None
        in_backward = engine.gradient_accumulation.reduction == "backward"
        reduces = self.lightning_module.automatic_optimization and in_backward
        if reduces and not engine.waits_for_hooks():
            assert engine.buffers is not None
            with engine.buffers.accumulating():
                yield
        else:
            with engine.no_sync():
                yield

    @override
    def has_unshared_hooks(self) -> bool:
        engine: Any = self.model
        return hasattr(engine, "has_unshared_hooks") and engine.has_unshared_hooks()

    @override
    def is_alone_in_windows(self) -> bool:
        engine: Any = self.model
        return hasattr(engine, "is_alone_in_windows") and engine.is_alone_in_windows()

    @override
    def share_users_hooks(self) -> None:
        engine: Any = self.model
        if hasattr(engine, "share_users_hooks"):  # ours
            engine.share_users_hooks()

    def grad_norm(self, optimizer: Any = None) -> float | None:
        """The global L2 norm of the gradient that the last optimizer step used.

        It is averaged over the ranks, unscaled, and measured before clipping by norm; infinite if the step was skipped
        for an fp16 overflow; None before the first step. It costs no reduction besides the step's own. Read it right
        after the step: at stage 0 in fp32 it may be None once the next backward begins.

        Args:
            optimizer: One of several optimizers, as ``self.optimizers()`` returns them: the norm of its last step.
                None: the norm of the last step of any optimizer.
        """
        from lightning_zeroplus.engine.engine import ZeroPlusEngine, gradient_norm

        return gradient_norm(self.model, part_of(optimizer)) if isinstance(self.model, ZeroPlusEngine) else None

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Names are registered in :mod:`lightning_zeroplus.strategy.names`, not by Lightning's class scan."""
