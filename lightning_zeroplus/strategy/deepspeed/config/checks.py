"""Settings of a DeepSpeed config that are refused, with the key and the remedy, before anything is built."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from lightning_zeroplus.engine.optimizer import chain
from lightning_zeroplus.engine.optimizer.elementwise import (
    calls_collectives,
    couples_tensors,
    draws_random_numbers,
    knows_identities,
    needs_all_groups,
)
from lightning_zeroplus.gradients.again import needs_closure
from lightning_zeroplus.precision.conversions import DOUBLE, autocast_dtype, low_precision_dtype, scales_losses
from lightning_zeroplus.strategy.common.modules import check_states
from lightning_zeroplus.strategy.deepspeed.config.types import check_types

#: Sections and settings of a DeepSpeed config that an engine of this package can honour.
KNOWN_KEYS = frozenset(
    """activation_checkpointing aio bf16 bfloat16 checkpoint comms_logger communication_data_type csv_monitor
    data_types disable_allgather disable_python_gc dump_state flops_profiler fp16 gradient_allreduce_op
    gradient_clipping gradient_predivide_factor load_universal_checkpoint log_level memory_breakdown
    monitor_config optimizer prescale_gradients scheduler seed seq_parallel_communication_data_type
    steps_per_print tensorboard timers torch_autocast train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism use_node_local_storage wall_clock_breakdown wandb comet
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization""".split()
)

#: Keys that DeepSpeed knows and this package cannot honour, with what to do instead.
REFUSED_KEYS = {
    "gradient_accumulation_steps": "Set `Trainer(accumulate_grad_batches=...)` instead.",
    "train_batch_size": "It follows from the data loader's batch size, the devices and `accumulate_grad_batches`.",
    "managed_gradient_accumulation": "The strategy owns the accumulation boundary: remove the key.",
    "amp": "Set `Trainer(precision=...)` instead.",
    "compile": "Set `ZeroPlusStrategy(compile=...)` instead.",
    "hybrid_engine": "The hybrid engine is not supported: remove the key.",
    "pipeline": "Pipeline parallelism is not supported: remove the key.",
    "tensor_parallel": "Tensor parallelism is not supported: remove the key.",
    "expert_parallel": "Expert parallelism is not supported: remove the key.",
    "data_efficiency": "Use a Lightning DataModule instead: remove the key.",
    "curriculum_learning": "Use a Lightning DataModule instead: remove the key.",
    "elasticity": "Elastic training is not supported: remove the key.",
    "nebula": "The strategy writes checkpoints itself: remove the key.",
    "compression_training": "It changes weights and activations outside of the optimizer: remove the key.",
    "sparse_gradients": "Gradients are reduced as dense ones: remove the key, and use `nn.Embedding(sparse=False)`.",
    "autotuning": "Autotuning is not supported: remove the key.",
}

#: Refused keys that are accepted when they are False, or a section with ``"enabled": False``.
_MAY_BE_OFF = frozenset(
    "hybrid_engine data_efficiency curriculum_learning elasticity autotuning nebula compression_training"
    " sparse_gradients".split()
)

_BITS = {"fp16": "16", "bf16": "bf16"}

#: Keys of the ``zero_optimization`` section that this package cannot honour, and why.
REFUSED_ZERO_KEYS = {
    "zenflow": "it updates parameters outside of the optimizer step",
    "mics_shard_size": "MiCS reduces gradients in two stages, which windows do not support",
    "zero_quantized_gradients": "windows reduce unquantized gradients",
    "zero_quantized_weights": "a forward would use other weights than under DDP",
    "zero_quantized_nontrainable_weights": "a forward would use other weights than under DDP",
}


def check(config: Mapping[str, Any], precision: str) -> None:
    """Check the config against the precision and DeepSpeed's own models, before any process group is made.

    Raises:
        MisconfigurationException: If a setting contradicts the precision, or DeepSpeed refuses it; naming it.
    """
    check_precision(config, precision)
    check_sections(config)
    check_masters(config, precision)


def check_keys(config: Mapping[str, Any]) -> None:
    """Refuse keys that are unknown or that the strategy cannot honour, and values of a wrong type.

    Raises:
        MisconfigurationException: If there is one, naming the key and the remedy.
    """
    for key, value in config.items():
        if key in _MAY_BE_OFF and (value is False or (isinstance(value, Mapping) and value.get("enabled") is False)):
            continue
        if key in REFUSED_KEYS:
            raise MisconfigurationException(
                f"`config[{key!r}]` contradicts `ZeroPlusStrategy`, which sets it itself or cannot honour it."
                f" {REFUSED_KEYS[key]}"
            )
        if key not in KNOWN_KEYS:
            close = difflib.get_close_matches(key, KNOWN_KEYS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else " Remove it, or check its spelling."
            raise MisconfigurationException(f"`config[{key!r}]` is not a DeepSpeed setting.{hint}")
    check_types(config)
    zero = config.get("zero_optimization", {})
    for key, reason in REFUSED_ZERO_KEYS.items():
        if zero.get(key):
            raise MisconfigurationException(
                f"`config['zero_optimization'][{key!r}]={zero[key]!r}` is not supported: {reason}. Remove the key."
            )
    if zero.get("compute_grad_norm") is False:
        raise MisconfigurationException(
            "`config['zero_optimization']['compute_grad_norm']=False` is not supported: clipping, `grad_norm()` and the"
            " check for overflows need the norm. Remove the key."
        )
    if config.get("activation_checkpointing", {}).get("contiguous_memory_optimization"):
        raise MisconfigurationException(
            "`config['activation_checkpointing']['contiguous_memory_optimization']=True` is not supported: it needs"
            " activations that model parallelism partitions. Remove the key."
        )
    optimizer = config.get("optimizer", {}).get("type", "")
    if optimizer.lower() == "muon":
        raise MisconfigurationException(
            f"`config['optimizer']['type']={optimizer!r}` is not supported: it needs whole gradients, and a window"
            " reduces them into partitions. Use another optimizer."
        )


def check_offload(offload: str | None, stage: int, user: Mapping[str, Any]) -> None:
    """Refuse an ``offload`` argument that is unknown, needs another stage, or contradicts the config.

    Raises:
        MisconfigurationException: In these cases, naming the argument, its value and the remedy.
    """
    if offload is None:
        return
    if offload != "cpu":
        raise MisconfigurationException(
            f'`offload` must be None or "cpu", not {offload!r}. For NVMe, set'
            " `config['zero_optimization']['offload_optimizer']`."
        )
    if stage == 0:
        raise MisconfigurationException('`offload="cpu"` needs ZeRO stage 1, 2 or 3, not 0.')
    for section in ("offload_optimizer", "offload_param"):
        device = (user.get("zero_optimization", {}).get(section) or {}).get("device", offload)
        if device != offload:
            raise MisconfigurationException(
                f"`offload={offload!r}` contradicts `config['zero_optimization'][{section!r}]['device']={device!r}`."
                " Give it once."
            )


def check_precision(config: Mapping[str, Any], precision: str) -> None:
    """Refuse a config whose precision is not the Trainer's.

    Raises:
        MisconfigurationException: If they differ, naming the section and the Trainer's precision.
    """
    if autocast_dtype(precision) is not None:
        _check_autocast(config, precision)
    wanted = precision_section(precision)
    for section in ("fp16", "bf16"):
        enabled = config.get(section, {}).get("enabled", section == wanted)
        if bool(enabled) != (section == wanted):
            wish = f'Set `Trainer(precision="{_BITS[section]}-true")` if you want it; the' if enabled else "The"
            raise MisconfigurationException(
                f"`config[{section!r}]['enabled']={enabled}` contradicts `Trainer(precision={precision!r})`."
                f" {wish} strategy sets the key, so remove it."
            )


def _check_autocast(config: Mapping[str, Any], precision: str) -> None:
    if config.get("torch_autocast", {}).get("enabled"):
        raise MisconfigurationException(
            f"`config['torch_autocast']['enabled']=True` contradicts `Trainer(precision={precision!r})`, which runs the"
            " forward under `torch.autocast`, and reduces gradients in fp32: DeepSpeed's section reduces them in 16"
            " bits. Remove the section."
        )
    ignored = [key for key in config.get("bf16", {}) if key != "enabled"]
    if ignored:
        raise MisconfigurationException(
            f"`config['bf16'][{ignored[0]!r}]={config['bf16'][ignored[0]]!r}` contradicts"
            f" `Trainer(precision={precision!r})`, whose weights are fp32. Remove the key, or set"
            ' `Trainer(precision="bf16-true")`.'
        )


def check_double(precision: str, stage: int) -> None:
    """Refuse fp64 where the optimizer's partitions are fp32.

    Raises:
        MisconfigurationException: Naming both.
    """
    if precision == DOUBLE and stage > 0:
        raise MisconfigurationException(
            f"`precision={precision!r}` is not supported at ZeRO stage {stage}, whose partitions are fp32. Use"
            " `strategy='zeroplus_stage0'`."
        )


def check_clipping(config: Mapping[str, Any], gradient_clip_val: float | None) -> None:
    """Refuse two different clipping limits.

    Raises:
        MisconfigurationException: If config and Trainer both clip, with different limits.
    """
    configured = config.get("gradient_clipping") or 0.0
    if configured and gradient_clip_val and configured != gradient_clip_val:
        raise MisconfigurationException(
            f"`config['gradient_clipping']={configured}` contradicts `Trainer(gradient_clip_val={gradient_clip_val})`."
            " Give the limit once."
        )


def check_optimizer(optimizer: Optimizer | None, stage: int, precision: str) -> None:
    """Refuse optimizers that the stage cannot serve: LBFGS, none, used ones, and states of a class of their own.

    Args:
        optimizer: The user's; a :class:`.ChainedOptimizer` for several.
        stage: The ZeRO stage.
        precision: As in ``Trainer(precision=...)``.

    Raises:
        MisconfigurationException: If it is refused, naming the optimizer and the remedy.
    """
    parts = chain.parts_of(optimizer)
    steps_itself = stage == 0 and low_precision_dtype(precision) is None and not scales_losses(precision)
    again = next(filter(needs_closure, filter(None, parts)), None)
    if again is not None and not steps_itself:
        raise MisconfigurationException(
            f"`{type(again).__name__}` evaluates the loss several times within its step. Under ZeRO this is supported"
            " at stage 0, with fp32 weights and no loss scale: use `strategy='zeroplus_stage0'` and"
            " `precision='32-true'`, `strategy='zeroplus_fsdp'`, or another optimizer."
        )
    if isinstance(optimizer, _MockOptimizer) and stage > 0:
        raise MisconfigurationException(
            f"`configure_optimizers` returned None, no parameter is trainable, and ZeRO stage {stage} has nothing to"
            " partition. Use `strategy='zeroplus_stage0'`."
        )
    if any(map(chain.is_used_up, parts)):
        raise MisconfigurationException(
            "`configure_optimizers` returned an optimizer of an earlier fit, whose parameters and states lie in the"
            " partitions of that fit. Return a new one. To continue with its states, use `trainer.fit(ckpt_path=...)`."
        )
    for part in filter(None, parts):
        check_states(part, f"ZeRO stage {stage}", cuts=stage > 0)
        _check_step(part, stage)


def _check_step(optimizer: Optimizer, stage: int) -> None:
    name = type(optimizer).__name__
    shown = [each for each in ("param_groups", "state") if isinstance(getattr(type(optimizer), each, None), property)]
    if shown:
        raise MisconfigurationException(
            f"`{name}` shows the `{shown[0]}` of an optimizer that it wraps by a property. ZeRO gives an optimizer"
            " groups of its partitions, and the wrapped one would not see them. Use `strategy='zeroplus_fsdp'`,"
            " `strategy='ddp'`, or the wrapped optimizer."
        )
    if calls_collectives(optimizer):
        raise MisconfigurationException(
            f"`{name}` calls collectives in its step, in which all ranks must take part with the same parameters. Under"
            " ZeRO each rank updates its own. Use `strategy='zeroplus_fsdp'`, `strategy='ddp'`, or a form of the"
            " optimizer for one device."
        )
    if stage > 0 and knows_identities(optimizer):
        raise MisconfigurationException(
            f"`{name}` knows parameters by `id(param)`, or as keys. At ZeRO stage {stage} it steps parts of flat"
            " tensors in their place, and would find none of them. Use `strategy='zeroplus_fsdp'`,"
            " `strategy='zeroplus_stage0'`, an option of a parameter group, or an attribute of the parameter."
        )
    if stage > 0 and draws_random_numbers(optimizer):
        raise MisconfigurationException(
            f"`{name}` draws random numbers in its step. At ZeRO stage {stage} each rank updates its part of the"
            " parameters, and would draw others than under DDP. Use `strategy='zeroplus_fsdp'`,"
            " `strategy='zeroplus_stage0'`, or another optimizer."
        )
    if stage > 0 and couples_tensors(optimizer):
        raise MisconfigurationException(
            f"`{name}` computes the update of a parameter from the gradients of others, too. At ZeRO stage {stage} each"
            " rank updates its part of the parameters, and sees no other gradients. Use `strategy='zeroplus_fsdp'` or"
            " `strategy='zeroplus_stage0'`. If it clips by a global norm, let `Trainer(gradient_clip_val=...)` clip"
            " instead, and switch that off."
        )
    if stage > 0 and needs_all_groups(optimizer) is None:
        raise MisconfigurationException(
            f"`{name}` computes the update of a group of parameters from other groups, too. ZeRO stage {stage} updates"
            " one group after the other. Use `strategy='zeroplus_fsdp'`, `strategy='zeroplus_stage0'`, or one group."
        )


_STATES, _MASTERS = "bf16_optimizer_states", "bf16_master_weights_and_grads"


def check_masters(config: Mapping[str, Any], precision: str, optimizer: Optimizer | None = None) -> None:
    """Refuse master weights and optimizer states in 16 bits where DeepSpeed does not keep them so.

    Args:
        config: The config, with the stage.
        precision: As in ``Trainer(precision=...)``.
        optimizer: The user's; None where it is not known yet.

    Raises:
        MisconfigurationException: If a key needs another one, another stage, precision or optimizer; naming both.
    """
    low = {key for section in ("fp16", "bf16") for key, value in config.get(section, {}).items() if value is True}
    asked = sorted(low & {_STATES, _MASTERS, "fp16_master_weights_and_grads"})
    if not asked:
        return
    section = asked[0].partition("_")[0]
    key = f"`config[{section!r}][{asked[0]!r}]=True`"
    if section != precision_section(precision):
        raise MisconfigurationException(
            f"{key} contradicts `Trainer(precision={precision!r})`. Set"
            f' `Trainer(precision="{_BITS[section]}-true")`, or remove the key.'
        )
    zero = config.get("zero_optimization", {})
    if not zero.get("stage", 0):
        raise MisconfigurationException(f"{key} is supported at ZeRO stages 1 to 3. Set `stage=1`, or remove the key.")
    if _STATES in low and _MASTERS not in low:
        raise MisconfigurationException(f"{key} needs `config['bf16'][{_MASTERS!r}]=True`. Set it, or remove the key.")
    offloads = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if not offloads and _STATES not in low:
        remedy = f"Set `config['bf16'][{_STATES!r}]=True` too, or " if section == "bf16" else "Set "
        raise MisconfigurationException(
            f"{key}: optimizer states would be fp32, which DeepSpeed supports where they are offloaded."
            f' {remedy}`offload="cpu"` with the optimizer `deepspeed.ops.adam.DeepSpeedCPUAdam`, or remove the key.'
        )
    if not offloads:
        return
    wanted = "DeepSpeedCPUAdam" + ("(..., fp32_optimizer_states=False)" if _STATES in low else "")
    for part in filter(None, chain.parts_of(optimizer)):
        fp32_states = _STATES in low and getattr(part, "fp32_optimizer_states", True)
        if type(part).__name__ != "DeepSpeedCPUAdam" or fp32_states:
            raise MisconfigurationException(
                f'{key} with `offload="cpu"` needs the optimizer `deepspeed.ops.adam.{wanted}`, and not this'
                f" `{type(part).__name__}`. Use it, or remove the key or the offload."
            )


def check_sections(config: Mapping[str, Any]) -> None:
    """Let DeepSpeed's pydantic models validate their sections, before anything is built.

    Raises:
        MisconfigurationException: If one is wrong, naming the section and its wrong keys.
    """
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    models = {"zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config}
    for section, model in models.items():
        try:
            model(**config.get(section, {}))
        except (ValidationError, TypeError, ValueError, AssertionError) as error:
            items = error.errors() if isinstance(error, ValidationError) else []
            problems = [
                f"{'.'.join(str(part) for part in item['loc'])}={item.get('input')!r}: {item['msg']}" for item in items
            ]
            raise MisconfigurationException(
                f"`config[{section!r}]` is wrong: {'; '.join(problems) or error}. Correct or remove it."
            ) from error


def precision_section(precision: str) -> str | None:
    """The config section that enables the Trainer's ``precision``; None for fp32 and fp64 weights."""
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(low_precision_dtype(precision))  # type: ignore[arg-type]
