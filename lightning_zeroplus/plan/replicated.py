"""DDP and stage 0: every rank has all weights, gradients and states."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_zeroplus.plan.estimate import Collective, Estimate
from lightning_zeroplus.plan.model import Model, Weight, casts, largest, size
from lightning_zeroplus.plan.settings import Settings
from lightning_zeroplus.precision.conversions import low_precision_dtype

#: Bytes of DDP's first bucket and of the others.
_DDP_BUCKETS = (1 << 20, 25 << 20)
#: The most elements that stage 0 flattens at a time.
_FLAT_ELEMENTS = 500_000_000


def ddp(model: Model, settings: Settings, ranks: int, backwards: int, reductions: int) -> Estimate:
    """DistributedDataParallel: gradients and their buckets are different memory, unless they are views."""
    trained = model.trained
    weights = size(model.weights) + model.buffers
    reduced = buckets = size(trained)
    gradients = 0 if settings.bucket_views else reduced
    states, working = _step(model, None)
    common = {"weights": weights, "gradients": gradients, "states": states, "buckets": buckets}
    moments = {
        "backward": {**common, "working": sum(casts(model, trained)) + (largest(trained) if backwards > 1 else 0)},
        "step": {**common, "working": working},
    }
    count = sum(1 for _ in _ddp_buckets(trained))
    return Estimate(
        "ddp",
        False,
        ranks,
        moments,
        weights + states + buckets,
        0,
        (Collective("all_reduce", "gradients", reductions * count, reductions * reduced, True),),
    )


def _ddp_buckets(trained: list[Weight]) -> Iterable[int]:
    """Bytes of each bucket, filled in the reverse order of the parameters."""
    filled: dict[torch.dtype, int] = {}
    limits: dict[torch.dtype, int] = {}
    for weight in reversed(trained):
        dtype = weight.dtype
        filled[dtype] = filled.get(dtype, 0) + size([weight])
        if filled[dtype] >= limits.get(dtype, _DDP_BUCKETS[0]):
            limits[dtype] = _DDP_BUCKETS[1]
            yield filled.pop(dtype)
    yield from filled.values()


def stage0(model: Model, settings: Settings, ranks: int, backwards: int) -> Estimate:
    """Stage 0: one all-reduce per step of what the backwards have summed."""
    trained = model.trained
    low = low_precision_dtype(model.precision)
    masters = 0
    if low is None:
        weights = size(model.weights) + model.buffers
        sums: dict[Weight, torch.dtype] = {weight: weight.dtype for weight in trained}
    else:
        weights = size(model.weights, low) + model.buffers
        sums = dict.fromkeys(trained, settings.sum_dtype(model))
        masters = size([weight for weight in trained if weight.group is not None], torch.float32)
    gradients = sum(weight.numel * dtype.itemsize for weight, dtype in sums.items())
    states, working = _step(model, None if low is None else torch.float32)
    flat = max(_flats(sums), default=(0, 0))[0]
    # The masters get gradients of their own dtype.
    copies = masters if low is not None and settings.sum_dtype(model) == low else 0
    common = {"weights": weights, "gradients": gradients, "states": states + masters}
    arriving = largest(trained, low) if backwards > 1 else 0
    moments = {
        "backward": {**common, "working": sum(casts(model, trained)) + arriving},
        "reduction": {**common, "buckets": flat},
        "step": {**common, "working": working + copies},
    }
    count, payload = 0, 0
    presence = len(model.weights) * next(iter(sums.values())).itemsize
    for size_, elements_ in _flats(sums):
        count += 1
        wire = settings.config.get("communication_data_type")
        payload += size_ if wire is None else elements_ * settings.wire_dtype(model).itemsize
    return Estimate(
        "zeroplus_stage0",
        False,
        ranks,
        moments,
        weights + states + masters + (gradients if low is None else 0),  # kept for `grad_norm()`
        0,
        (Collective("all_reduce", "gradients", count, payload + presence, False),),
    )


def _flats(sums: dict[Weight, torch.dtype]) -> Iterable[tuple[int, int]]:
    """Bytes and elements of each tensor that is all-reduced."""
    for dtype in dict.fromkeys(sums.values()):
        filled = 0
        for weight, own in sums.items():
            if own == dtype:
                filled += weight.numel
                if filled > _FLAT_ELEMENTS:
                    yield filled * dtype.itemsize, filled
                    filled = 0
        if filled:
            yield filled * dtype.itemsize, filled


def _step(model: Model, dtype: torch.dtype | None) -> tuple[int, int]:
    """Bytes of the states, and of what a step needs besides, if the optimizers have whole tensors."""
    needs = [
        model.optimizers.need(index, [(weight.shape, dtype or weight.dtype) for weight in group])
        for index, group in enumerate(model.grouped())
        if group
    ]
    return sum(need.states for need in needs), max((need.working for need in needs), default=0)
