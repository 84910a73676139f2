"""Whether a program has the same outcome as its reference.

The error of a tensor is the L2 norm of its difference from the reference's over the norm of the reference's. The error
of an update is the L2 norm of the differences of all parameters together, over the distance by which the reference has
moved them. In fp32 both must be within the bound, which a program may set for updates alone; in 16 bits, where a weight
has 3 or 4 digits, only the second.
Weights of 16 bits are compared with the reference's, rounded.
The error of a metric is its difference over the reference's absolute value, or over 0.1 where that is smaller. A loss
has the rounding of its forward besides that of the weights, so that no bound of metrics is below `ROUNDING_OF_METRICS`.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Largest errors. fp32: the order of additions, over a few steps. 16 bits against fp32: 8 or 11 bits of every
#: activation, gradient and partial sum.
BOUNDS = {"mixed": 1e-5, "64": 1e-10, "32": 1e-5, "bf16": 4e-2, "16": 1e-2}
#: Eight units in the last place of fp32, in which Lightning keeps metrics.
ROUNDING_OF_METRICS = 2**-20


@dataclass
class Result:
    """What a program has left behind, on one rank."""

    #: Parameters and buffers of each module, by ``index.name``.
    state: dict[str, Tensor] = field(default_factory=dict)
    #: Names of those that are trainable parameters.
    trainable: list[str] = field(default_factory=list)
    #: State of the first module when its fit began; empty where nobody looked.
    start: dict[str, Tensor] = field(default_factory=dict)
    #: State of the module after each batch of training; empty where nobody looked.
    after_batch: list[dict[str, Tensor]] = field(default_factory=list)
    kept: dict[str, Tensor] = field(default_factory=dict)
    #: What each Trainer has logged: per call of a logger (on rank 0), and in the end.
    logged: list[list[tuple[Any, dict[str, float]]]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    #: ``global_step`` of each Trainer.
    steps: list[int] = field(default_factory=list)


def still(result: Result, stays: Iterable[str]) -> list[str]:
    """Trainable parameters that did not move, but for those that may stay."""
    return [
        name
        for name in result.trainable
        if name in result.start
        and torch.equal(result.state[f"0.{name}"], result.start[name])
        and not any(fnmatch.fnmatch(name, pattern) for pattern in stays)
    ]


def differences(
    got: Result, want: Result, bound: float, low: bool, unmeasured: Iterable[str], of_updates: float | None = None
) -> list[str]:
    """What is not equal, in words; empty: nothing."""
    found = []
    if got.steps != want.steps:
        found.append(f"steps {got.steps} instead of {want.steps}")
    found += _tensors(got.state, want.state, math.inf if low else bound)
    found += _tensors(got.kept, want.kept, bound)
    of_metrics = max(bound, ROUNDING_OF_METRICS)
    update = _update_error(got, want)
    if not update <= (of_updates or bound):
        found.append(f"update off by {update:.1e}")
    for index, (mine, theirs) in enumerate(zip(got.logged, want.logged, strict=True)):
        if len(mine) != len(theirs):
            found.append(f"fit {index}: logged {len(mine)} times instead of {len(theirs)}")
        for (step, left), (_, right) in zip(mine, theirs, strict=False):
            found += [f"step {step}: {text}" for text in _metrics(left, right, of_metrics, unmeasured)]
    for left, right in zip(got.metrics, want.metrics, strict=True):
        found += _metrics(left, right, of_metrics, unmeasured)
    return found


def _tensors(got: Mapping[str, Tensor], want: Mapping[str, Tensor], bound: float) -> list[str]:
    if got.keys() != want.keys():
        return [f"names {sorted(got.keys() ^ want.keys())} on one side only"]
    found = []
    for name, right in want.items():
        left = got[name]
        if left.shape != right.shape:
            found.append(f"{name} is {tuple(left.shape)} instead of {tuple(right.shape)}")
        elif math.isfinite(bound) and left.dtype != right.dtype:
            found.append(f"{name} is {left.dtype} instead of {right.dtype}")
        elif not (error := tensor_error(left, right)) <= bound:
            found.append(f"{name} off by {error:.1e}")
    return found


def tensor_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of ``want``; 0 for equal tensors."""
    if torch.equal(got, want):
        return 0.0
    left, right = (_as_real(each) for each in (got, want))
    if not bool(left.isfinite().all()):
        return math.inf
    return float((left - right).norm() / right.norm().clamp(min=1e-7 * math.sqrt(right.numel())))


def _update_error(got: Result, want: Result) -> float:
    if not want.start:
        return 0.0
    error = moved = 0.0
    for name in want.trainable:
        end = want.state[f"0.{name}"]
        mine = got.state.get(f"0.{name}")
        if name in want.start and mine is not None and mine.shape == end.shape:
            # Weights of 16 bits are compared with what is right in 16 bits.
            error += float((_as_real(mine) - _as_real(end.to(mine.dtype))).square().sum())
            moved += float((_as_real(want.start[name]) - _as_real(end)).square().sum())
    return math.sqrt(error / moved) if moved else 0.0


def _as_real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def _metrics(got: Mapping[str, float], want: Mapping[str, float], bound: float, unmeasured: Iterable[str]) -> list[str]:
    found = []
    for name in sorted(got.keys() | want.keys()):
        if any(fnmatch.fnmatch(name, pattern) for pattern in unmeasured):
            continue
        if name not in got or name not in want:
            found.append(f"metric {name} on one side only")
        elif got[name] == want[name] or (math.isnan(got[name]) and math.isnan(want[name])):
            continue
        elif math.isinf(want[name]) or not abs(got[name] - want[name]) <= bound * max(abs(want[name]), 0.1):
            found.append(f"metric {name} is {got[name]:.6g} instead of {want[name]:.6g}")
    return found
