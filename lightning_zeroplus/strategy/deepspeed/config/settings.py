"""The DeepSpeed config of a strategy: defaults, and the user's settings merged over them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
from lightning.fabric.strategies.deepspeed import _format_precision_config
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_zeroplus.precision.conversions import autocast_dtype
from lightning_zeroplus.strategy.deepspeed.config.checks import check_keys, check_offload, precision_section

if TYPE_CHECKING:
    from lightning_zeroplus.engine.reduction.local_sums import Reduction

# The largest default of ``reduce_bucket_size``, in elements. Lightning's default is 200 million. Smaller buckets
# overlap better and need less memory, and on the CPU they reduce 256 MiB 1.2 times as fast.
_MAX_BUCKET_ELEMENTS = 2**24
# Where a reduction overlaps with the backward: a bucket for the whole model would be full when the backward is over.
# Below 4 MiB a collective costs more than it hides.
_OVERLAPPED_BUCKETS, _MIN_OVERLAPPED_ELEMENTS = 4, 2**20
# On the CPU weights of so many elements in all stay whole between two steps of stage 3: 64 MiB in fp32.
_WHOLE_ELEMENTS = 2**24
# DeepSpeed's default for each weight.
_PERSISTENT_ELEMENTS = 100_000
# Of torch's `GradScaler`: every overflow halves the scale, as long as it takes.
_GRAD_SCALER = {"loss_scale_window": 2000, "hysteresis": 1, "min_loss_scale": 0}


class FrozenConfig(dict[str, Any]):
    """A config that refuses changes, also in its sections. A copy of it is an ordinary dict.

    A strategy outlives its fits: a change that one fit made would be a setting of the next one.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({key: FrozenConfig(v) if isinstance(v, Mapping) else v for key, v in config.items()})

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("The config of a strategy is fixed. Make another strategy, with `config={...}`.")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __copy__(self) -> dict[str, Any]:
        return _plain(self)

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return _plain(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenConfig, (_plain(self),)


def thawed(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """A mutable copy, for DeepSpeed."""
    assert config is not None
    return _plain(config)


class Settings(NamedTuple):
    """The settings of a strategy, resolved from its arguments and its config.

    Attributes:
        stage: The ZeRO stage.
        reduction: When gradients are averaged: ``"auto"``, ``"backward"`` or ``"step"``.
        accumulate_dtype: See :class:`~lightning_zeroplus.ZeroPlusStrategy`.
        bucket_buffers: How many reduction buckets take turns.
        config: The DeepSpeed config: the user's over the defaults.
    """

    stage: int
    reduction: Reduction
    accumulate_dtype: torch.dtype | None
    bucket_buffers: int
    config: FrozenConfig


def resolve(
    stage: int | None,
    reduction: str,
    accumulate_dtype: torch.dtype | str | None,
    offload: str | None,
    config: Mapping[str, Any] | str | Path | None,
    environment_variable: str,
) -> Settings:
    """Resolve the arguments of a strategy.

    Raises:
        MisconfigurationException: If settings are unknown or contradict each other, naming the key.
    """
    user = load_config(config, environment_variable)
    bucket_buffers = take_bucket_buffers(user)
    check_keys(user)
    stage = resolve_stage(stage, user)
    check_offload(offload, stage, user)
    when = check_reduction(reduction)
    dtype = resolve_accumulate_dtype(accumulate_dtype, user)
    merged = merge(default_config(stage, offload), user)
    if dtype is not None:
        merged = with_fp32_gradients(merged, stage)
    return Settings(stage, when, dtype, bucket_buffers, FrozenConfig(merged))


def check_reduction(reduction: str) -> Reduction:
    """``"auto"``, ``"backward"`` or ``"step"``.

    Raises:
        MisconfigurationException: If ``reduction`` is something else.
    """
    if reduction not in ("auto", "backward", "step"):
        raise MisconfigurationException(f'`reduction` must be "auto", "backward" or "step", not {reduction!r}.')
    return cast("Reduction", reduction)


def completed(
    config: Mapping[str, Any], precision: str, device: str, loss_scale: Mapping[str, int] | None = None
) -> FrozenConfig:
    """``config`` with the settings that depend on the precision, the type of device, and the installed DeepSpeed.

    Args:
        config: The user's over the defaults.
        precision: As in ``Trainer(precision=...)``.
        device: ``"cpu"`` or ``"cuda"``.
        loss_scale: What the section ``fp16`` gets from the ``GradScaler`` of the user's precision plugin.

    Raises:
        MisconfigurationException: If ``config`` has a loss scale, too.
    """
    from lightning_zeroplus.engine.families.older_deepspeed import await_gathers

    full = _with_device_defaults(config, device)
    await_gathers(full)
    # DeepSpeed uses the batch size for its throughput log only.
    full.setdefault("train_micro_batch_size_per_gpu", 1)
    # The strategy accumulates: for DeepSpeed every step has one micro-batch.
    full["gradient_accumulation_steps"] = 1
    section = precision_section(precision)
    if section in full:
        full[section].setdefault("enabled", True)  # the user may have set a loss scale only
    if autocast_dtype(precision) is not None:
        # The weights are fp32. The section has the loss scale alone, which is that of torch's `GradScaler` by default.
        given = full.get("fp16", {})
        twice = [] if not loss_scale else [key for key in (*loss_scale, "loss_scale") if key in given]
        if twice:
            raise MisconfigurationException(
                f'`config={{"fp16": {{{twice[0]!r}: {given[twice[0]]!r}}}}}` sets a loss scale, and so does the'
                " `GradScaler` of `MixedPrecision(scaler=...)`. Give one of them."
            )
        full["fp16"] = _GRAD_SCALER | dict(loss_scale or {}) | given | {"enabled": False}
        return FrozenConfig(full)
    _format_precision_config(
        config=full,
        precision=precision,
        loss_scale=0.0,
        loss_scale_window=1000,
        min_loss_scale=1,
        initial_scale_power=16,
        hysteresis=2,
    )
    if full.get("bf16", {}).get("enabled"):
        full["bf16"].setdefault("check_grad_overflow", False)  # DDP skips no step
    return FrozenConfig(full)


def _with_device_defaults(config: Mapping[str, Any], device: str) -> dict[str, Any]:
    """``config``, on a GPU with overlapped reductions, and with pinned memory for what is offloaded to the host.

    A copy between pageable memory and a GPU lets the host wait. On the CPU nothing overlaps with a collective.
    """
    has_streams = device != "cpu"
    defaults: dict[str, Any] = {"overlap_comm": has_streams}
    for name in ("offload_optimizer", "offload_param"):
        if has_streams and (config["zero_optimization"].get(name) or {}).get("device") == "cpu":
            defaults[name] = {"pin_memory": True}
    return merge({"zero_optimization": defaults}, _plain(config))


def bucket_elements(elements: int, overlapped: bool) -> int:
    """The default of ``reduce_bucket_size``.

    Args:
        elements: Of all trained parameters.
        overlapped: Whether hooks reduce while the backward goes on.
    """
    size = max(1, min(elements, _MAX_BUCKET_ELEMENTS))
    return min(size, max(elements // _OVERLAPPED_BUCKETS, _MIN_OVERLAPPED_ELEMENTS)) if overlapped else size


def with_sizes(config: Mapping[str, Any], module: nn.Module, keeps_whole: bool) -> FrozenConfig:
    """``config`` with sizes that fit the module, unless the user has set them.

    - ``reduce_bucket_size``. Where hooks reduce while the backward goes on, the module has several buckets.
    - ``stage3_param_persistence_threshold``. All weights of a small module stay whole, so that no layer has to be
      gathered before its forward.

    Args:
        config: The config.
        module: The module.
        keeps_whole: Whether the weights of a small module may stay whole between two steps.
    """
    sizes = [(_full_numel(param), param.requires_grad) for param in module.parameters()]
    zero = config["zero_optimization"]
    overlapped = zero["stage"] >= 2 and bool(zero.get("overlap_comm"))
    chosen = {"reduce_bucket_size": bucket_elements(sum(size for size, trained in sizes if trained), overlapped)}
    elements = sum(size for size, _ in sizes)
    moved = ("offload_param", "offload_optimizer", "zero_hpz_partition_size", "zero_quantized_weights")
    if zero["stage"] == 3 and keeps_whole and elements <= _WHOLE_ELEMENTS and not any(map(zero.get, moved)):
        chosen["stage3_param_persistence_threshold"] = max(elements, _PERSISTENT_ELEMENTS)
    return FrozenConfig(merge({"zero_optimization": chosen}, config))


def _full_numel(param: nn.Parameter) -> int:
    # A parameter that zero.Init has partitioned is empty; `ds_numel` is its full size.
    return int(getattr(param, "ds_numel", param.numel()))


def for_inference(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that an engine without an optimizer needs."""
    sections = {"train_micro_batch_size_per_gpu", "fp16", "bf16"}
    if config["zero_optimization"]["stage"] == 3:
        sections |= {"zero_optimization", "zero_allow_untested_optimizer"}
    return {key: value for key, value in config.items() if key in sections}


def load_config(config: Mapping[str, Any] | str | Path | None, environment_variable: str) -> dict[str, Any]:
    """Read the user's part of the config: a dict, a JSON file, or the file that the environment names.

    Raises:
        MisconfigurationException: If the file is missing, is not JSON, or does not hold an object.
    """
    source = "config"
    if config is None and environment_variable in os.environ:
        config, source = os.environ[environment_variable], f"environment variable {environment_variable}"
    if config is None:
        return {}
    if isinstance(config, Mapping):
        try:
            return json.loads(json.dumps(_plain(config)))
        except (TypeError, ValueError) as error:
            raise MisconfigurationException(f"`config` must hold only values that JSON can represent: {error}.")
    if not isinstance(config, (str, Path)):
        raise MisconfigurationException(f"`config` must be a dict or the path of a JSON file, not {config!r}.")
    try:
        loaded = json.loads(Path(config).read_text(encoding="utf-8"))
    except OSError as error:
        raise MisconfigurationException(f"The DeepSpeed config {str(config)!r} ({source}) cannot be read: {error}.")
    except ValueError as error:  # a null byte in the path, invalid UTF-8, or invalid JSON
        raise MisconfigurationException(f"The DeepSpeed config {str(config)!r} ({source}) is not JSON: {error}.")
    if not isinstance(loaded, dict):
        raise MisconfigurationException(
            f"The DeepSpeed config {str(config)!r} ({source}) must be a JSON object, not {type(loaded).__name__}."
        )
    return loaded


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def merge(defaults: Mapping[str, Any], user: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``user`` over ``defaults``, section by section; the user wins."""
    merged = dict(defaults)
    for key, value in user.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def take_bucket_buffers(config: dict[str, Any]) -> int:
    """Remove the section ``zeroplus``, which DeepSpeed does not know, from ``config``.

    Returns:
        ``bucket_buffers``, 2 by default.

    Raises:
        MisconfigurationException: If the section has another key, or the value is not an integer from 2 to 8.
    """
    section = config.pop("zeroplus", {})
    if not isinstance(section, Mapping) or section.keys() - {"bucket_buffers"}:
        raise MisconfigurationException(
            f"`config['zeroplus']` must be a section like {{'bucket_buffers': 4}}, not {section!r}."
        )
    buffers = section.get("bucket_buffers", 2)
    if not isinstance(buffers, int) or isinstance(buffers, bool) or not 2 <= buffers <= 8:
        raise MisconfigurationException(
            f"`config['zeroplus']['bucket_buffers']` must be an integer from 2 to 8, not {buffers!r}."
        )
    return buffers


def resolve_accumulate_dtype(dtype: torch.dtype | str | None, user: Mapping[str, Any]) -> torch.dtype | None:
    """``torch.float32``, or None where the argument leaves it to the config.

    Raises:
        MisconfigurationException: If the argument is another dtype, or contradicts the config.
    """
    if dtype is None:
        return None
    if dtype not in (torch.float32, "float32", "fp32"):
        raise MisconfigurationException(f"`accumulate_dtype` must be None or torch.float32, not {dtype!r}.")
    configured = user.get("data_types", {}).get("grad_accum_dtype", "fp32")
    if configured not in ("fp32", "float32"):
        raise MisconfigurationException(
            f"`accumulate_dtype={dtype!r}` contradicts `config['data_types']['grad_accum_dtype']={configured!r}`."
            " Give it once."
        )
    return torch.float32


def with_fp32_gradients(config: Mapping[str, Any], stage: int) -> FrozenConfig:
    """``config`` with fp32 gradient partitions, whatever the parameters' dtype, unless the user has set a dtype.

    Upstream has no such setting at stage 0, where the engine handles it.
    """
    return FrozenConfig(merge({"data_types": {"grad_accum_dtype": "fp32"}} if stage > 0 else {}, config))


def default_config(stage: int, offload: str | None) -> dict[str, Any]:
    """The defaults of a strategy, for settings that the user does not give.

    Args:
        stage: The ZeRO stage.
        offload: None or ``"cpu"``.
    """
    zero: dict[str, Any] = {"stage": stage, "contiguous_gradients": True}
    if offload is not None:
        zero["offload_optimizer"] = {"device": offload}
        if stage == 3:
            zero["offload_param"] = {"device": offload}
    return {
        "zero_allow_untested_optimizer": True,
        # A torch optimizer can step on the CPU too, and unlike DeepSpeed's own needs no compiler.
        "zero_force_ds_cpu_optimizer": False,
        # DeepSpeed's own default is 1.0: silently clipped gradients.
        "gradient_clipping": 0.0,
        # DeepSpeed's would wait for the device three times per step, for a log that Lightning's users do not see.
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": zero,
    }


def resolve_stage(stage: int | None, user: Mapping[str, Any]) -> int:
    """The ZeRO stage of the argument or the config; 3 if neither gives one.

    Raises:
        MisconfigurationException: If they contradict each other, or the stage is not 0, 1, 2 or 3.
    """
    configured = user.get("zero_optimization", {}).get("stage")
    if stage is not None and configured is not None and stage != configured:
        raise MisconfigurationException(
            f"`stage={stage}` contradicts `config['zero_optimization']['stage']={configured}`. Give it once."
        )
    resolved = next((value for value in (stage, configured) if value is not None), 3)
    if not isinstance(resolved, int) or resolved not in (0, 1, 2, 3) or isinstance(resolved, bool):
        raise MisconfigurationException(f"`stage` must be 0, 1, 2 or 3, not {resolved!r}.")
    return resolved
