"""The distance between consumed and computed gradients, parameter by parameter, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zeroplus.callbacks.audit.ledger import Entry, Ledger
from lightning_zeroplus.callbacks.audit.report import ParameterAudit, default_tolerance, dtype_name
from lightning_zeroplus.callbacks.audit.shares import Share, full_shape
from lightning_zeroplus.gradients.clip import Clip


class _Measure(NamedTuple):
    # Of this rank's share: the squared norms of the difference, of the expected and of the consumed gradient, the
    # scalar product of the last two, the share's start and number of elements, the number of backwards, and the dtypes
    # of the raw and of the consumed gradient as indices into _DTYPES, 0 for no gradient. Ranks exchange it as float64.
    # The first four are computed on the device, and the host waits for all of them at once.
    difference: float
    want: float
    got: float
    product: float
    start: float
    numel: float
    backwards: float
    raw: float
    consumed: float


# Dtypes by increasing machine epsilon, numbered so that ranks can exchange them. Any other dtype counts as the last.
_DTYPES = (None, torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Comparison:
    """Compares one optimizer step. All ranks construct it together, when the gradient is final.

    Args:
        ledger: The computed gradients; the constructor averages them over the ranks.
        params: The audited parameters of the optimizer, by name, the same on all ranks.
        shares: Where this rank's optimizer holds them, by the parameter's ``id``.
        clips: The clippings of the gradient, in order.
        norm_is_known: Whether ``params`` are all of the optimizer's parameters, so that their norm is the norm that
            was clipped. Otherwise a common factor of at most 1 is fitted.
        wires: The dtypes in which gradients are reduced, by name, where they are known.
        tolerance: The largest error; None takes the tolerance of the coarsest dtype that a gradient has had.
    """

    def __init__(
        self,
        ledger: Ledger,
        params: Mapping[str, nn.Parameter],
        shares: Mapping[int, Share],
        clips: Iterable[Clip],
        norm_is_known: bool,
        wires: Mapping[str, torch.dtype],
        tolerance: float | None,
    ) -> None:
        self._params = params
        self._shares = shares
        self._wires = wires
        self._tolerance = tolerance
        self._measures: dict[str, _Measure] = {}
        self._products: dict[str, list[Tensor]] = {}  # the first four of the measure, while they are on the device
        shapes = {name: full_shape(param) for name, param in params.items()}
        ledger.average(shapes)
        self._entries = {name: ledger.entry(name, shape) for name, shape in shapes.items()}
        self._fit_factor = False
        for clip in clips:
            if clip.algorithm == "norm" and not norm_is_known:
                self._fit_factor = True
            else:
                _clip(self._entries.values(), clip)

    def consume(self, held: Collection[Tensor], divisor: float = 1.0) -> None:
        """Measure the shares whose gradients an optimizer is about to use.

        Args:
            held: The tensors that the optimizer will update.
            divisor: The optimizer's own divisor of their gradients (a fused optimizer under a gradient scaler).
        """
        updated = {id(tensor) for tensor in held}
        for name, param in self._params.items():
            share = self._shares.get(id(param))
            if share is not None and id(share.held) in updated:
                self._measure(name, param, share, share.gradient(), divisor)

    def finish(self, step: int) -> list[ParameterAudit]:
        """Return the results, the same on all ranks. A share that no optimizer has updated counts as a zero gradient.

        Args:
            step: The number of optimizer steps before this one.
        """
        for name, param in self._params.items():
            share = self._shares.get(id(param))
            if share is not None and name not in self._measures:
                self._measure(name, param, share, None, 1.0)
        ranks = self._gather()
        magnitudes = self._magnitudes()
        factor = _common_factor(ranks) if self._fit_factor else None
        return [
            self._result(name, step, [measures[index] for measures in ranks], magnitudes[index], factor)
            for index, name in enumerate(self._params)
            if any(measures[index].numel for measures in ranks)  # else no optimizer has it
        ]

    def _measure(self, name: str, param: nn.Parameter, share: Share, got: Tensor | None, divisor: float) -> None:
        entry = self._entries[name]
        want = entry.total.reshape(-1).narrow(0, share.start, share.numel)
        exact = torch.zeros_like(want) if got is None else got.to(want.device, want.dtype) / divisor
        difference = exact - want
        pairs = ((difference, difference), (want, want), (exact, exact), (exact, want))
        self._products[name] = [_dot(*pair) for pair in pairs]
        self._measures[name] = _Measure(
            *(0.0,) * 4,
            start=float(share.start),
            numel=float(share.numel),
            backwards=float(entry.backwards),
            raw=_number(entry.dtype if entry.backwards else None),
            consumed=_number(None if got is None else got.dtype),
        )

    def _gather(self) -> list[list[_Measure]]:
        nothing = _Measure(*[0.0] * len(_Measure._fields))
        local = [
            self._measures.get(name) or nothing._replace(backwards=entry.backwards, raw=_number(entry.dtype))
            for name, entry in self._entries.items()
        ]
        if not local:
            return [local]
        device = next(iter(self._entries.values())).total.device
        table = torch.tensor(local, dtype=torch.float64).to(device)
        nothing_measured = [table.new_zeros(())] * 4
        products = [self._products.get(name, nothing_measured) for name in self._entries]
        table[:, :4] = torch.stack([each.to(device) for four in products for each in four]).view(-1, 4)
        gathered = [table]
        if dist.is_initialized() and dist.get_world_size() > 1:
            gathered = [torch.empty_like(table) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, table)
        return [[_Measure(*row) for row in each] for each in torch.stack(gathered).tolist()]

    def _magnitudes(self) -> list[float]:
        magnitudes = [entry.magnitude for entry in self._entries.values()]
        return torch.stack(magnitudes).tolist() if magnitudes else []

    def _result(
        self, name: str, step: int, ranks: list[_Measure], magnitude: float, factor: float | None
    ) -> ParameterAudit:
        numel = math.prod(full_shape(self._params[name]))
        parts: dict[float, tuple[float, float]] = {}  # by start; if several ranks have the same share, the worst counts
        for measure in ranks:
            size, square = parts.get(measure.start, (0.0, 0.0))
            parts[measure.start] = max(size, measure.numel), max(square, _square(measure, factor))
        covered = sum(size for size, _ in parts.values())
        distance = math.sqrt(sum(square for _, square in parts.values()))
        scale = magnitude * (1.0 if factor is None else factor)
        if covered < numel:
            error = math.inf  # some of it reaches no optimizer
        elif not math.isfinite(scale):
            error = math.nan  # cannot be judged
        elif not math.isfinite(distance):
            error = math.inf
        else:
            error = distance / scale if scale else (math.inf if distance else 0.0)
        dtypes = _way(ranks, self._wires.get(name))
        want, product = (sum(getattr(measure, field) for measure in ranks) for field in ("want", "product"))
        backwards = [int(measure.backwards) for measure in ranks]
        return ParameterAudit(
            name=name,
            step=step,
            backwards=(min(backwards), max(backwards)),
            error=error,
            tolerance=default_tolerance(dtypes) if self._tolerance is None else self._tolerance,
            ratio=product / want if want else math.nan,
            dtypes=tuple(map(dtype_name, dtypes)),
        )


def _way(ranks: list[_Measure], wire: torch.dtype | None) -> list[torch.dtype]:
    """The dtypes of a gradient from the leaf to the optimizer, each the coarsest of all ranks."""
    raw, consumed = (_DTYPES[int(max(getattr(m, field) for m in ranks))] for field in ("raw", "consumed"))
    return [dtype for dtype in (raw, wire if raw and consumed else None, consumed) if dtype is not None]


def _number(dtype: torch.dtype | None) -> int:
    return _DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES) - 1


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return torch.dot(left.double(), right.double())


def _square(measure: _Measure, factor: float | None) -> float:
    """The squared distance. Only a factor needs the expanded form, whose rounding adds 1e-8 of the norm."""
    square = measure.difference
    if factor is not None:
        square = measure.got - 2 * factor * measure.product + factor**2 * measure.want
    return max(0.0, square) if math.isfinite(square) else math.inf  # max() would lose a NaN


def _common_factor(ranks: list[list[_Measure]]) -> float:
    want = sum(measure.want for measures in ranks for measure in measures)
    product = sum(measure.product for measures in ranks for measure in measures)
    return min(1.0, max(0.0, product / want)) if want else 1.0


def _clip(entries: Collection[Entry], clip: Clip) -> None:
    if clip.algorithm == "norm":
        norms = [torch.linalg.vector_norm(entry.total, dtype=torch.float64) for entry in entries]
        norm = float(torch.stack(norms).norm()) if norms else 0.0
        # As torch.nn.utils.clip_grad_norm_ does.
        factor = min(1.0, clip.limit / (norm + 1e-6))
        for entry in entries:
            entry.total.mul_(factor)
            entry.magnitude.mul_(factor)
        return
    for entry in entries:
        before = torch.linalg.vector_norm(entry.total, dtype=torch.float64)
        entry.total.clamp_(-clip.limit, clip.limit)
        after = torch.linalg.vector_norm(entry.total, dtype=torch.float64)
        # Errors are relative to the clamped gradient.
        entry.magnitude.mul_(torch.where(before > 0, after / before, 1.0))
