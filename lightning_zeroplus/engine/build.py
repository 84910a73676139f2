"""Building an engine, where ``deepspeed.initialize`` would build upstream's."""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.partition_parameters import restore_init_context, shutdown_init_context
from torch import nn
from torch.optim import Optimizer

from lightning_zeroplus.engine import compiled_parts
from lightning_zeroplus.engine.engine import ZeroPlusEngine
from lightning_zeroplus.engine.hooks.received import release_dropped
from lightning_zeroplus.engine.optimizer.chain import move_states, parts_of, states_of
from lightning_zeroplus.engine.optimizer.elementwise import needs_whole_tensors, show_groups_where_needed
from lightning_zeroplus.engine.reduction.local_sums import Reduction
from lightning_zeroplus.engine.upstream import probe
from lightning_zeroplus.engine.upstream.dtypes import check_dtypes
from lightning_zeroplus.engine.upstream.scalars import ScalarsAsBytes
from lightning_zeroplus.engine.upstream.sharded_init import any_first_dtype, partition_whole_parameters
from lightning_zeroplus.gradients.ranks.several import LockstepGroup
from lightning_zeroplus.internals.torch import GRADIENTS, check_torch
from lightning_zeroplus.weights.errors import check_not_scripted
from lightning_zeroplus.weights.holders import held_weights, take_left
from lightning_zeroplus.weights.listed import check_registered, list_all
from lightning_zeroplus.weights.partitioned import access, copies

# The engine last built for a module. If the module is trained again, that engine's hooks must be removed first: they
# would run in every backward.
_ENGINES: WeakKeyDictionary[nn.Module, weakref.ref[ZeroPlusEngine]] = WeakKeyDictionary()


def build_engine(
    model: nn.Module,
    optimizer: Optimizer | None,
    config: dict[str, Any],
    *,
    lr_scheduler: Any = None,
    device_index: int | None = None,
    reduction: Reduction = "backward",
    accumulate_dtype: torch.dtype | None = None,
    grad_dtypes: Mapping[str, torch.dtype | None] | None = None,
    bucket_buffers: int = 2,
    lockstep_group: LockstepGroup | None = None,
    scales_losses: bool = False,
    anew: ZeroPlusEngine | None = None,
) -> ZeroPlusEngine:
    """Build a :class:`ZeroPlusEngine`, instead of ``deepspeed.initialize``; destroys the module's previous engine.

    Args:
        model: The module to train; its parameters may be partitioned already (``deepspeed.zero.Init``).
        optimizer: The optimizer over the model's parameters; None if ``config`` names one, or for inference.
        config: A complete DeepSpeed config.
        lr_scheduler: A scheduler of ``optimizer``.
        device_index: Index of this rank's accelerator; None on CPU.
        reduction: See :class:`ZeroPlusEngine`.
        accumulate_dtype: See :class:`ZeroPlusEngine`.
        grad_dtypes: See :class:`ZeroPlusEngine`. For others, ``param.grad_dtype`` counts if the user has set it.
        bucket_buffers: See :class:`ZeroPlusEngine`.
        lockstep_group: See :class:`ZeroPlusEngine`.
        scales_losses: See :class:`ZeroPlusEngine`.
        anew: The module's engine, which has no optimizer: it is built anew with one, and stays the same object.

    Raises:
        ValueError: If the model has trainable parameters of a dtype that this stage cannot train, or DeepSpeed's
            mixture-of-experts layers, whose experts are not on all ranks.
        UnsupportedDeepSpeedError: If this DeepSpeed lacks something that the engine relies on.
        UnsupportedTorchError: If this torch does.
    """
    probe.check(config.get("zero_optimization", {}).get("stage", 0))
    check_torch(GRADIENTS)
    experts = [name for name, module in model.named_modules() if isinstance(module, MoE)]
    if experts:
        raise ValueError(
            f"The model has mixture-of-experts layers of DeepSpeed ({experts[0]!r}), which are not supported: the"
            " experts' gradients belong to some ranks. Use experts that every rank has, such as a plain ModuleList."
        )
    previous = _ENGINES.pop(model, lambda: None)()
    if previous is not None:
        previous.destroy()
    release_dropped()
    list_all(model)
    if optimizer is not None:
        check_registered(model, filter(None, parts_of(optimizer)))
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage == 3:
        check_not_scripted(model)
    low = {"fp16": torch.float16, "bf16": torch.bfloat16}
    check_dtypes(
        model,
        stage,
        next((dtype for key, dtype in low.items() if config.get(key, {}).get("enabled")), None),
        trains=optimizer is not None or "optimizer" in config,
    )
    needs_whole = optimizer is not None and stage > 0 and any(map(needs_whole_tensors, parts_of(optimizer)))
    if optimizer is not None and stage > 0:
        show_groups_where_needed(parts_of(optimizer))
    states = states_of(optimizer) if optimizer is not None else []
    held = held_weights(model) + take_left(model) if optimizer is not None else []
    # A zero.Init that is still open would partition the engine's own parameters.
    shutdown_init_context()
    try:
        config_class = DeepSpeedConfig(config)
        deepspeed.set_optimizer_flags(config_class, model)
        if config_class.zero_config.stage == 3:
            compiled_parts.keep_apart(model)
            partition_whole_parameters(model, config)
        with ScalarsAsBytes(), any_first_dtype():
            engine = ZeroPlusEngine.__new__(ZeroPlusEngine) if anew is None else anew
            engine.__dict__.clear()
            engine.__init__(  # type: ignore[misc]
                reduction=reduction,
                accumulate_dtype=accumulate_dtype,
                grad_dtypes=grad_dtypes or {},
                bucket_buffers=bucket_buffers,
                lockstep_group=lockstep_group,
                scales_losses=scales_losses,
                args=argparse.Namespace() if device_index is None else argparse.Namespace(device_rank=device_index),
                model=model,
                optimizer=optimizer,
                model_parameters=[p for p in model.parameters() if p.requires_grad],
                lr_scheduler=lr_scheduler,
                dist_init_required=False,
                config=config,
                config_class=config_class,
            )
    finally:
        restore_init_context()
    if needs_whole and engine.gradient_accumulation is not None:
        engine.gradient_accumulation.step_whole_tensors()
    if any(states) and engine.gradient_accumulation is not None:
        engine.gradient_accumulation.states.begin(states)
    if optimizer is not None:
        move_states(optimizer)
    access.install(model)
    copies.install(model)
    if engine.gradient_accumulation is not None:
        engine.gradient_accumulation.hold(held)
    _ENGINES[model] = weakref.ref(engine)
    return engine
