"""FSDP2: units are gathered, and their gradients reduced, each in one collective; of rank 0, which has the most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from lightning_zeroplus.plan.estimate import Collective, Estimate
from lightning_zeroplus.plan.model import Model, Unit, Weight
from lightning_zeroplus.plan.settings import Settings
from lightning_zeroplus.precision.conversions import autocast_dtype


class _Bytes(NamedTuple):
    """Bytes of a unit.

    Attributes:
        stays: Whether it stays gathered from its forward to its backward.
        gathered: Of its whole weights, in the dtype of computation; padded.
        gradients: Of its whole gradients, in the dtype of their reduction.
        padded: Of the input of their reduction.
        reduced: Of this rank's shard of the gradients, in the weights' dtype.
    """

    stays: bool
    gathered: int
    gradients: int
    padded: int
    reduced: int


def fsdp(
    model: Model, settings: Settings, ranks: int, backwards: int, window: bool, accumulates: bool = False
) -> Estimate:
    """``zeroplus_fsdp``; where it knows that another backward follows, whole weights stay for that."""
    assert model.units is not None
    computed = autocast_dtype(model.precision)
    units = [_bytes(unit, ranks, computed, settings.reduce_dtype) for unit in model.units]
    needs = [
        model.optimizers.need(index, [(_shard(weight, ranks), weight.dtype) for weight in group])
        for index, group in enumerate(model.grouped())
        if group
    ]
    states = sum(need.states for need in needs)
    weights = model.buffers + sum(_numel(weight, ranks) * weight.dtype.itemsize for weight in model.weights)
    reduced = sum(unit.reduced for unit in units)
    everything = sum(unit.gradients for unit in units)
    common = {"weights": weights, "states": states}
    goes_on = backwards > 1  # there are gradients of an earlier backward
    waits = {"window": everything if goes_on else 0} if window else {"gradients": reduced if goes_on else 0}
    stays = accumulates or (window and not settings.always_waits)
    first = {**common, "working": _most_gathered(units, False)}
    last = {**common, **waits, "working": _most_gathered(units, goes_on and stays)}
    moments = {"forward": _most([first, last])}
    if window:
        inner = max((unit.gathered for unit in units if not unit.stays), default=0)
        kept = sum(unit.gathered for unit in units if unit.stays)
        arriving = _arriving(model, computed, settings.reduce_dtype) if goes_on else 0
        moments["backward"] = {**common, "window": everything, "working": kept + 2 * inner + arriving}
        moments["reduction"] = {**common, **_most(_window(units))}
    else:
        # A backward that another follows leaves weights whole that stay until the backward.
        several = [_backward(units, backwards > 2, True)] if goes_on and accumulates else []
        moments["backward"] = {**common, **_most(chain(_backward(units, goes_on, False), *several))}
    moments["step"] = {**common, "gradients": reduced, "working": max((need.working for need in needs), default=0)}
    trained = [unit for unit in units if unit.gradients]
    reductions = 1 if window else backwards
    of_a_child = 1 if stays else backwards
    gathers = [of_a_child if unit.stays else 2 * backwards for unit in units]
    payload = sum(times * unit.gathered for times, unit in zip(gathers, units, strict=True))
    wire = (
        Collective(
            "reduce_scatter",
            "gradients",
            reductions * len(trained),
            reductions * sum(unit.padded for unit in trained),
            not window,
        ),
        Collective("all_gather", "weights", sum(gathers), payload, True),
    )
    return Estimate("zeroplus_fsdp", window, ranks, moments, weights + states, 0, wire)


def _bytes(unit: Unit, ranks: int, computed: torch.dtype | None, reduce_dtype: torch.dtype | None) -> _Bytes:
    trained = [weight for weight in unit.weights if weight.trains]

    def summed(weight: Weight) -> int:
        return (reduce_dtype or computed or weight.dtype).itemsize

    return _Bytes(
        unit.stays,
        sum(_numel(each, ranks) * ranks * (computed or each.dtype).itemsize for each in unit.weights),
        sum(each.numel * summed(each) for each in trained),
        sum(_numel(each, ranks) * ranks * summed(each) for each in trained),
        sum(_numel(each, ranks) * each.dtype.itemsize for each in trained),
    )


def _arriving(model: Model, computed: torch.dtype | None, reduce_dtype: torch.dtype | None) -> int:
    """Bytes of the largest gradient before it is added, in the dtype in which it comes and in that of the sum."""

    def both(weight: Weight) -> int:
        dtype = computed or weight.dtype
        return weight.numel * (dtype.itemsize + (reduce_dtype.itemsize if reduce_dtype not in (None, dtype) else 0))

    return max(both(weight) for weight in model.trained)


def _shard(weight: Weight, ranks: int) -> tuple[int, ...]:
    """The shape of the largest shard; a scalar is on every rank."""
    return (-(-weight.shape[0] // ranks), *weight.shape[1:]) if weight.shape else (1,)


def _numel(weight: Weight, ranks: int) -> int:
    return math.prod(_shard(weight, ranks))


def _most(moments: Iterable[dict[str, int]]) -> dict[str, int]:
    return max(moments, key=lambda each: sum(each.values()))


def _most_gathered(units: Sequence[_Bytes], are_there: bool) -> int:
    """Gathered weights in a forward: the units that stay, and two of the others. One that arrives is copied.

    Args:
        units: The units.
        are_there: The units that stay have stayed since an earlier backward.
    """
    inner = max((unit.gathered for unit in units if not unit.stays), default=0)
    kept = [unit.gathered for unit in units if unit.stays]
    return sum(kept) + max(3 * inner, kept[-1] if kept and not are_there else 0)


def _window(units: Sequence[_Bytes]) -> Iterator[dict[str, int]]:
    """The moments in which a window is reduced, unit by unit."""
    waiting, reduced = sum(unit.gradients for unit in units), 0
    for unit in units:
        yield {"window": waiting, "buckets": unit.padded, "gradients": reduced}
        waiting -= unit.gradients
        reduced += unit.reduced


def _backward(units: Sequence[_Bytes], goes_on: bool, keeps: bool) -> Iterator[dict[str, int]]:
    """The moments of a backward, from the last unit to the first.

    Args:
        units: The units.
        goes_on: There are gradients of an earlier backward.
        keeps: What has stayed gathered since the forward stays for another one.
    """
    trees: list[list[_Bytes]] = [[]]
    for unit in units:
        trees[-1].append(unit)
        if unit.stays:
            trees.append([])
    there = sum(unit.gathered for unit in units if unit.stays)
    reduced = sum(unit.reduced for unit in units) if goes_on else 0
    before = 0  # the input of the previous reduction, which ends with the next one
    for tree in reversed(trees):
        inner = [unit for unit in reversed(tree) if not unit.stays]
        for position, unit in enumerate([*inner, *(unit for unit in tree if unit.stays)]):
            passing = 0 if unit.stays else unit.gathered
            ahead = inner[position + 1].gathered if position + 1 < len(inner) else 0
            yield {
                "gradients": reduced + unit.gradients,
                "buckets": before,
                "working": there + passing + ahead,
            }
            there -= unit.gathered if unit.stays and not keeps else 0
            yield {
                "gradients": reduced + unit.gradients,
                "buckets": unit.padded,
                "working": there + ahead,
            }
            reduced += 0 if goes_on else unit.reduced
            before = unit.padded
