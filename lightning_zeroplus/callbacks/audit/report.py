"""The result of an audit, its table and its error message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from lightning_zeroplus.table import print_table

# The largest error that rounding explains, by the coarsest dtype that a gradient has had: about four epsilons for the
# low precisions. Sums of n backwards in bf16 are off by about 2**-8 * sqrt(n) / 3.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 4e-3}
_COARSE_TOLERANCE = 3e-2
_SHOWN = 30
_NAMES = {torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}


class GradientMismatchError(RuntimeError):
    """The optimizer consumed other gradients than the backwards computed; raised by ``GradientAudit``."""


class ParameterAudit(NamedTuple):
    """The result of :class:`~lightning_zeroplus.GradientAudit` for one parameter in one optimizer step.

    Attributes:
        name: The parameter's name in the LightningModule.
        step: The number of audited optimizer steps before this one.
        backwards: The minimum and the maximum over the ranks of the number of gradients that autograd computed.
        error: The L2 distance between the consumed and the expected gradient, divided by the summed norms of the raw
            gradients (mean over the ranks). That sum does not vanish where gradients cancel; the norm of the sum would.
            Infinite if the optimizer lacks a part of the parameter, if the consumed gradient is not finite, or if it
            is not zero and no backward computed one; NaN if the raw gradients are not finite.
        tolerance: The largest error that passes.
        ratio: The projection of the consumed gradient on the expected one, as a fraction of the expected one: 1 if
            right, 0.25 if three of four equal backwards are lost; NaN if the expected gradient is zero.
        dtypes: The gradient's dtypes: in the leaf, in the reduction where known, in the optimizer. A parameter without
            a gradient has fewer.
    """

    name: str
    step: int
    backwards: tuple[int, int]
    error: float
    tolerance: float
    ratio: float
    dtypes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance. An error of NaN passes: it cannot be judged."""
        return not self.error > self.tolerance


def default_tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """The largest error that rounding explains for a gradient that has had these dtypes."""
    return max((_TOLERANCES.get(dtype, _COARSE_TOLERANCE) for dtype in dtypes), default=min(_TOLERANCES.values()))


def dtype_name(dtype: torch.dtype) -> str:
    """``bf16`` for ``torch.bfloat16``, and so on."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def print_results(results: Sequence[ParameterAudit], steps: int) -> None:
    """Print each parameter's worst step, worst parameters first, at most :data:`30 <_SHOWN>` of them."""
    worst: dict[str, ParameterAudit] = {}
    for result in results:
        if result.name not in worst or _rank(result) > _rank(worst[result.name]):
            worst[result.name] = result
    ordered = sorted(worst.values(), key=_rank, reverse=True)
    failed = sum(not result.passed for result in ordered)
    verdict = f"{failed} of {len(ordered)} parameters differ" if failed else f"all {len(ordered)} parameters agree"
    title = f"Gradients consumed against gradients computed, {steps} optimizer step{'s' * (steps != 1)}: {verdict}"
    rows = [_row(result) for result in ordered[:_SHOWN]]
    if len(ordered) > _SHOWN:
        rest = ordered[_SHOWN].error
        rows.append((f"... and {len(ordered) - _SHOWN} more", "", f"<= {rest:.1e}", "", "", ""))
    print_table(title, ("parameter", "backwards", "error", "projection", "dtypes", ""), rows, right=(1, 2, 3))


def _rank(result: ParameterAudit) -> tuple[bool, float]:
    return not result.passed, -1.0 if math.isnan(result.error) else result.error


def _row(result: ParameterAudit) -> tuple[str, ...]:
    least, most = result.backwards
    return (
        result.name,
        str(most) if least == most else f"{least} to {most}",
        "not finite" if math.isnan(result.error) else f"{result.error:.1e}",
        "" if math.isnan(result.ratio) else f"{result.ratio:.4g}",
        " > ".join(result.dtypes),
        "" if result.passed else "WRONG",
    )


def describe_failure(results: Sequence[ParameterAudit]) -> str:
    """The error message: what differs, and what may have caused it."""
    failed = [result for result in results if not result.passed]
    worst = max(failed, key=_rank)
    message = (
        f"The optimizer's gradient is not the mean over the ranks of what the backwards have computed: {len(failed)} of"
        f" {len(results)} parameters differ, most of all {worst.name!r}, by {worst.error:.2g} (tolerance"
        f" {worst.tolerance:.0e}) after {worst.backwards[1]} backwards."
    )
    ratios = [result.ratio for result in results if not math.isnan(result.ratio)]
    if ratios and max(ratios) - min(ratios) <= 1e-4 * abs(max(ratios)):
        message += (
            f" All gradients are {ratios[0]:.4g} times the expected ones. If the loop clips or scales them by hand, use"
            " `self.clip_gradients(...)`, which the audit accounts for; otherwise a loss scale or an average is wrong."
        )
    elif worst.backwards[1] > 1:
        message += " Gradients of some backwards are lost, counted twice, or rounded."
    elif not worst.backwards[1]:
        message += " No backward has given it a gradient since the last zero_grad()."
    return message
