"""Stages 1 and 2: flat partitions of each parameter group; of rank 0, which has no padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lightning_zeroplus.plan.estimate import Collective, Estimate
from lightning_zeroplus.plan.model import casts, elements, largest, size
from lightning_zeroplus.plan.zero import FP32, Zero


def stage12(stage: int, zero: Zero) -> Estimate:
    """Stage 1 or 2."""
    model, optimized = zero.model, zero.optimized
    parts = [_part(elements(group), zero.ranks) for group in model.grouped()]
    of_weight = FP32 if zero.low is None else zero.low.itemsize
    weights = size(zero.whole, zero.low) + model.buffers + sum(parts) * zero.ranks * of_weight
    states, working, notes = zero.needs(parts)
    states += sum(parts) * zero.master
    name = f"zeroplus_stage{stage}" + ("_offload" if zero.offload else "")
    gathers = Collective("all_gather", "weights", sum(map(bool, parts)), sum(parts) * zero.ranks * of_weight, False)
    if stage == 1 and zero.low is torch.bfloat16 and zero.sum_dtype is torch.float32:
        return _bf16_optimizer(zero, parts, weights, states, working, gathers, notes)
    host = 0
    if zero.offload:
        # Besides states: gradients of the master weights, sums in the weights' dtype, a copy of the weights.
        host = states + sum(parts) * (FP32 + 2 * of_weight + (0 if zero.low else FP32)) + largest(optimized, zero.low)
        states = 0
    common = {"weights": weights, "states": states}
    waits = stage == 1 or zero.window
    arriving, copies = largest(optimized, zero.sum_dtype), sum(casts(model, model.trained))
    averages = 0 if zero.offload else sum(parts) * zero.sum
    bucket = min(zero.bucket, elements(optimized)) * zero.wire
    # Offload: a buffer for one gradient on its way.
    buffers = largest(optimized, zero.low) if zero.offload else 0
    moments: dict[str, dict[str, int]] = {}
    if waits:
        sums = elements(optimized) * zero.sum
        held = {**common, "window": sums, "buckets": buffers}
        moments["backward"] = {**held, "working": copies + (arriving if zero.backwards > 1 else 0)}
        moments["reduction"] = {**held, "gradients": averages, "buckets": buffers + bucket}
    else:
        turns = zero.settings.bucket_buffers if zero.settings.zero("overlap_comm", True) else 1
        buckets = buffers + turns * zero.bucket * zero.wire
        # Autocast's copies go one by one; the last bucket, and the copies that it needs, come when few are left.
        passing = max(copies, _passing(zero, parts))
        moments["backward"] = {**common, "gradients": averages, "buckets": buckets, "working": passing}
    if zero.compares:
        waiting = stage == 1 or zero.settings.always_waits  # the step reduces
        gradients = {"window": elements(optimized) * zero.sum} if waiting else {"gradients": averages}
        moments["masters"] = {**common, **gradients, "working": zero.comparing(max(parts, default=0))}
    moments["step"] = {**common, "buckets": buffers, **_step(zero, parts, working)}
    return Estimate(
        name,
        zero.window and stage == 2,
        zero.ranks,
        moments,
        weights + states + buffers,
        host,
        (*(_of_sums(zero, parts) if waits else _of_buckets(zero)), gathers),
        notes,
    )


def _part(numel: int, ranks: int) -> int:
    """Elements of a partition: upstream aligns them to two."""
    return -(-numel // (2 * ranks)) * 2


def _passing(zero: Zero, parts: Sequence[int]) -> int:
    """Gradients on their way in a backward.

    Under offload a full bucket is copied once more to be reduced. A gradient that is larger than a bucket is always
    copied, and stays to the end of the backward on the ranks that have a part of it.
    """
    stays = 0
    for group, part in zip(zero.model.grouped(), parts, strict=True):
        start = 0
        for weight in group:
            stays += weight.numel * zero.sum if weight.numel > zero.bucket and start < part else 0
            start += weight.numel
    small = elements([weight for weight in zero.optimized if weight.numel <= zero.bucket])
    copied = min(zero.bucket, small) * zero.wire if zero.offload else 0
    return stays + copied + largest(zero.optimized, zero.sum_dtype)


def _step(zero: Zero, parts: Sequence[int], working: Sequence[int]) -> dict[str, int]:
    """What the averages and the optimizer need in the step, group by group; the averages of a group end with it."""
    if zero.offload:
        return {}
    most, left = {"gradients": 0, "working": 0}, sum(parts) * zero.sum
    for part, needed in zip(parts, working, strict=True):
        low = part * zero.sum if zero.sum < FP32 else 0
        for moment in (
            {"gradients": left, "working": part * FP32 if low else 0},  # a copy in fp32
            {"gradients": left - low + (part * FP32 if low else 0), "working": needed},
        ):
            if sum(moment.values()) > sum(most.values()):
                most = moment
        left -= part * zero.sum
    return most


def _of_sums(zero: Zero, parts: Sequence[int]) -> Iterator[Collective]:
    """The reduction of what has waited, cut as :meth:`~.exchange.Exchange.cut` does on NCCL."""
    lengths = [0] * zero.ranks
    for group, part in zip(zero.model.grouped(), parts, strict=True):
        numel = elements(group)
        for rank in range(zero.ranks if part else 0):
            lengths[rank] += min(max(numel - rank * part, 0), part)
    total = sum(lengths)
    if not total:
        return
    if not zero.settings.zero("reduce_scatter", True) or max(lengths) * zero.ranks >= 2 * total:
        yield Collective("all_reduce", "gradients", -(-total // zero.bucket), total * zero.wire, False)
        return
    width = max(1, zero.bucket // zero.ranks)
    full = min(lengths) // width  # buckets in which every rank has its full part
    counts = {"reduce_scatter": full, "all_reduce": 0}
    payloads = {"reduce_scatter": full * width * zero.ranks, "all_reduce": 0}
    for index in range(full, -(-max(lengths) // width)):
        widths = [min(max(length - index * width, 0), width) for length in lengths]
        padded = max(widths) * zero.ranks
        kind = "reduce_scatter" if padded < 2 * sum(widths) else "all_reduce"
        counts[kind] += 1
        payloads[kind] += padded if kind == "reduce_scatter" else sum(widths)
    if counts["reduce_scatter"]:
        yield Collective(
            "reduce_scatter", "gradients", counts["reduce_scatter"], payloads["reduce_scatter"] * zero.wire, False
        )
    if counts["all_reduce"]:
        yield Collective("all_reduce", "gradients", counts["all_reduce"], payloads["all_reduce"] * zero.wire, False)


def _of_buckets(zero: Zero) -> Iterator[Collective]:
    """Upstream's buckets, in every backward; filled in the reverse order of the parameters."""
    count, filled = 0, 0
    for weight in reversed(zero.optimized):
        if filled and filled + weight.numel > zero.bucket:
            count, filled = count + 1, 0
        filled += weight.numel
    count += bool(filled)
    payload = elements(zero.optimized) * zero.wire
    if count:
        yield Collective("all_reduce", "gradients", zero.backwards * count, zero.backwards * payload, True)


def _bf16_optimizer(
    zero: Zero,
    parts: Sequence[int],
    weights: int,
    states: int,
    working: Sequence[int],
    gathers: Collective,
    notes: tuple[str, ...],
) -> Estimate:
    """Stage 1 in bf16 with fp32 gradients: every rank has all of them, in flat memory that stays."""
    flat = sum(parts) * zero.ranks * FP32
    common = {"weights": weights, "states": states, "gradients": flat}
    of_backward = elements(zero.optimized) * zero.sum
    payload = flat + len(zero.model.weights) * FP32
    return Estimate(
        "zeroplus_stage1",
        False,
        zero.ranks,
        {
            "backward": {**common, "working": of_backward},
            "reduction": {**common, "buckets": flat},
            "masters": {**common, "working": zero.comparing(max(parts, default=0))},
            "step": {**common, "working": max(working, default=0)},
        },
        weights + states + flat,
        0,
        (Collective("all_reduce", "gradients", 1, payload, False), gathers),
        notes,
    )
