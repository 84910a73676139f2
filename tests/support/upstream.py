"""Upstream's behaviour, made to run in the cells of the matrix: what the suite must be able to tell from ours."""

from __future__ import annotations

import argparse
import os
from typing import Any

from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy, ParallelStrategy
from torch import nn

import lightning_zeroplus as zp
from tests.matrix.cells import Cell, strategy_for


class CPUDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's own strategy, less its refusal of the CPU and of devices without a number."""

    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        import deepspeed

        engine, wrapped, _, _ = deepspeed.initialize(
            args=argparse.Namespace(),
            config=self.config,
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, wrapped


def lightnings_strategy(cell: Cell) -> DeepSpeedStrategy:
    """Lightning's DeepSpeed strategy with the cell's settings."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    config = cell.config() | {"zero_allow_untested_optimizer": True, "train_micro_batch_size_per_gpu": 1}
    config["zero_optimization"]["stage"] = cell.stage
    return CPUDeepSpeedStrategy(config=config, process_group_backend="gloo")


def unmanaged_strategy(cell: Cell) -> DeepSpeedStrategy:
    """Lightning's, with the setting of DeepSpeed's newer releases by which ``step()`` ends an accumulation."""
    strategy = lightnings_strategy(cell)
    assert isinstance(strategy.config, dict)
    strategy.config["managed_gradient_accumulation"] = False
    return strategy


class _WithoutAccumulation(zp.ZeroPlusStrategy):
    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        engine, wrapped = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        disable_accumulation(engine)
        return engine, wrapped


def disable_accumulation(engine: Any) -> None:
    """THE SWITCH: give engine and optimizer upstream's classes back, so that nothing of our accumulation is left."""
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import IPGBucket

    engine.gradient_accumulation.close()
    engine._module_zero_grad.remove()
    del engine.optimizer.gradient_accumulation
    if hasattr(engine.optimizer, "make_bucket"):
        engine.optimizer.ipg_buckets = {engine.optimizer.communication_data_type: IPGBucket()}
    # specialize() made type(name, (mixin, upstream class), {}).
    engine.optimizer.__class__ = type(engine.optimizer).__bases__[1]
    if engine.zero_optimization_stage() == 1:
        engine.optimizer._grad_acc_hooks.clear()
        engine.optimizer.create_gradient_handling_hooks()  # which the accumulation has removed
    if hasattr(engine.optimizer, "set_gradient_accumulation_boundary"):
        engine.optimizer.set_gradient_accumulation_boundary(True)
    engine.__class__ = DeepSpeedEngine


def ours_without_accumulation(cell: Cell) -> zp.ZeroPlusStrategy:
    """Our strategy with the multi-backward handling disabled."""
    ours = strategy_for(cell)
    ours.__class__ = _WithoutAccumulation
    return ours
