"""The settings of a strategy that change what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from lightning_zeroplus.fsdp.wrap import WrapPolicy
from lightning_zeroplus.plan.model import Model, elements
from lightning_zeroplus.precision.conversions import low_precision_dtype
from lightning_zeroplus.strategy.deepspeed.config.settings import bucket_elements
from lightning_zeroplus.strategy.deepspeed.trainer import ZeroPlusStrategy
from lightning_zeroplus.strategy.fsdp2.trainer import ZeroPlusFSDPStrategy

_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
}


@dataclass(frozen=True)
class Settings:
    """What a strategy was given; the defaults are the strategies'.

    Attributes:
        always_waits: ``reduction="step"``: the backwards of a step share one reduction at every stage.
        accumulate_dtype: Of :class:`~lightning_zeroplus.ZeroPlusStrategy`.
        bucket_buffers: Buckets that take turns at stages 1 and 2.
        config: The DeepSpeed config.
        wrap: Of :class:`~lightning_zeroplus.ZeroPlusFSDPStrategy`.
        reduce_dtype: The same.
        reshard_after_forward: The same.
        bucket_views: DDP's ``gradient_as_bucket_view``.
    """

    always_waits: bool = False
    accumulate_dtype: torch.dtype | None = None
    bucket_buffers: int = 2
    config: Mapping[str, Any] = field(default_factory=dict)
    wrap: WrapPolicy | None = None
    reduce_dtype: torch.dtype | None = torch.float32
    reshard_after_forward: bool | None = None
    bucket_views: bool = False

    def zero(self, key: str, default: Any) -> Any:
        """A setting of ``config["zero_optimization"]``."""
        section = self.config.get("zero_optimization", {})
        return section.get(key, section.get(key.removeprefix("stage3_"), default))

    def bucket_elements(self, model: Model, overlaps: bool) -> int:
        """Elements of a reduction bucket; ``overlaps``: it may be reduced while a backward goes on."""
        overlapped = overlaps and bool(self.zero("overlap_comm", True))  # the default on GPUs
        return int(self.zero("reduce_bucket_size", bucket_elements(elements(model.trained), overlapped)))

    def sum_dtype(self, model: Model) -> torch.dtype:
        """The dtype in which ZeRO sums and keeps gradients."""
        low = low_precision_dtype(model.precision)
        if low is None or self.accumulate_dtype is not None:
            return torch.float32
        name = self.config.get("data_types", {}).get("grad_accum_dtype")
        return low if name is None else _DTYPES[name.removeprefix("torch.")]

    def wire_dtype(self, model: Model) -> torch.dtype:
        """The dtype in which ZeRO reduces gradients."""
        name = self.config.get("communication_data_type")
        return self.sum_dtype(model) if name is None else _DTYPES[name]


def settings_of(strategy: Any) -> Settings:
    """The settings of a strategy, for all strategies that are planned.

    Args:
        strategy: A strategy, or the name of one, whose settings are the defaults.

    Raises:
        ValueError: If a setting is not counted here.
    """
    if isinstance(strategy, ZeroPlusFSDPStrategy):
        for name, value, counted in (
            ("replicate_size", strategy.replicate_size, 1),
            ("tensor_parallel_size", strategy._tensor_parallel_size, 1),
            ("offload", strategy.offload, None),
            ("reshard_after_forward", strategy.reshard_after_forward or None, None),
        ):
            if value != counted:
                raise ValueError(f"`{name}={value!r}` is not counted by `plan`. Plan without it.")
        return Settings(
            strategy.reduction == "step",
            wrap=strategy.wrap,
            reduce_dtype=strategy.reduce_dtype,
            reshard_after_forward=strategy.reshard_after_forward,
        )
    if isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy):
        return Settings(bucket_views=bool(strategy._ddp_kwargs.get("gradient_as_bucket_view")))
    if not isinstance(strategy, ZeroPlusStrategy):
        return Settings()
    assert isinstance(strategy.config, Mapping)
    settings = Settings(
        strategy.stage >= 2 and strategy.reduction == "step",
        strategy.accumulate_dtype,
        strategy.bucket_buffers,
        strategy.config,
    )
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    for section in ("offload_optimizer", "offload_param"):
        device = (settings.zero(section, None) or {}).get("device")
        if device not in (None, "none", "cpu"):
            raise ValueError(
                f"`config['zero_optimization'][{section!r}]['device']={device!r}` is not counted by `plan`, which knows"
                ' `offload="cpu"`. Plan without the key.'
            )
    for key, default in (
        ("zero_hpz_partition_size", 1),
        ("stage3_use_all_reduce_for_fetch_params", False),
        ("round_robin_gradients", False),
        ("stage3_model_persistence_threshold", None),
    ):
        value = settings.zero(key, default)
        if value != default:
            raise ValueError(
                f"`config['zero_optimization'][{key!r}]={value!r}` is not counted by `plan`. Plan without the key."
            )
    if settings.config.get("torch_autocast", {}).get("enabled"):
        raise ValueError("`config['torch_autocast']` is not counted by `plan`. Plan with `precision: bf16-mixed`.")
