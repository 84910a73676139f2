"""ReductionMonitor: the cost of gradient reductions."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_zeroplus.callbacks.traffic import ReductionTraffic, StepTraffic
from lightning_zeroplus.strategy.deepspeed.trainer import ZeroPlusStrategy
from lightning_zeroplus.table import print_table

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from matplotlib.figure import Figure

    from lightning_zeroplus.engine.compile.session import SkippedFrames
    from lightning_zeroplus.engine.engine import ZeroPlusEngine

# At a few hundred bytes per step this is some 20 MB.
_MAX_HISTORY = 100_000

_QUANTITIES = StepTraffic._fields[1:]
_TITLES = {
    "collectives": "gradient reductions",
    "bytes": "bytes reduced",
    "seconds": "time in reductions",
    "held_bytes": "unreduced gradients held",
}
_COLUMNS = ("per optimizer step", "mean", "median", "max", "total")


class ReductionMonitor(Callback):
    """Reports the cost of the gradient reductions of every optimizer step, on this rank.

    It counts four quantities, described at :class:`~lightning_zeroplus.callbacks.traffic.StepTraffic`: the number of
    collectives, their payload in bytes, the seconds spent in them, and the peak of unreduced gradients in bytes.

    - Loggers get them as ``reduction/collectives``, ``reduction/bytes``, ``reduction/seconds`` and
      ``reduction/held_bytes``, for every ``log_every_n_steps``-th optimizer step. The logged step is the number of
      optimizer steps before it.
    - The progress bar shows them as ``reductions``, ``reduced_MB`` (10^6 bytes), ``reduce_ms`` and ``held_MB``.
    - When the fit ends, rank 0 prints a summary of its own steps, with ``rich`` if that is installed. With
      ``compile=True`` at stage 3 it also prints the modules that Dynamo left to Python, and the bytes gathered for
      them.

    An optimizer step is a change of ``trainer.global_step``, in manual optimization too. Reductions after the last step
    are not reported. A strategy other than ``ZeroPlusStrategy`` gets a warning, and nothing is counted.

    Attributes:
        history: The steps of the last fit, on every rank. It keeps all of the first 100,000 steps. Whenever there are
            more entries, every second entry is dropped, and later steps are thinned likewise. The printed mean,
            maximum and total are of all steps; the median is of these.

    Example::

        monitor = ReductionMonitor()
        Trainer(strategy="zeroplus_stage2", callbacks=[monitor]).fit(module)
        monitor.plot("reductions.png")
    """

    history: list[StepTraffic]

    def __init__(self) -> None:
        self._traffic: ReductionTraffic | None = None
        self._reset()

    def _reset(self) -> None:
        self.history = []
        self._stride = 1
        self._steps = 0
        self._totals: list[float] = [0] * len(_QUANTITIES)
        self._maxima: list[float] = [0] * len(_QUANTITIES)
        self._skipped: SkippedFrames | None = None

    # -- counting -------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reset()
        strategy = trainer.strategy
        if not isinstance(strategy, ZeroPlusStrategy):
            rank_zero_warn(
                f"`ReductionMonitor` counts nothing with `{type(strategy).__name__}`: it needs a `ZeroPlusStrategy`."
            )
            return
        traffic = ReductionTraffic(strategy.model, lambda: trainer.global_step)
        traffic.install()
        self._traffic = traffic

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._traffic is not None:
            self._traffic.observe()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._traffic is not None:
            self._traffic.observe()
            self._report(trainer, self._traffic.drain_finished_steps())

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._traffic is not None:
            self._report(trainer, self._traffic.drain_finished_steps(wait=True))
            self._stop()
            compilation = cast("ZeroPlusEngine", trainer.strategy.model).compilation
            self._skipped = None if compilation is None else compilation.skipped_frames

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._traffic is not None:
            self._traffic.uninstall()
            self._traffic = None

    # -- reporting ------------------------------------------------------------------------------------------------

    def _report(self, trainer: pl.Trainer, steps: list[StepTraffic]) -> None:
        for traffic in steps:
            self._remember(traffic)
            every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector of the Trainer
            if every and (traffic.step + 1) % every == 0:
                metrics = {f"reduction/{name}": getattr(traffic, name) for name in _QUANTITIES}
                for logger in trainer.loggers:
                    logger.log_metrics(metrics, step=traffic.step)
        if steps and trainer.progress_bar_callback is not None:
            last = steps[-1]
            trainer.progress_bar_metrics.update(
                reductions=last.collectives,
                reduced_MB=last.bytes / 1e6,
                reduce_ms=last.seconds * 1e3,
                held_MB=last.held_bytes / 1e6,
            )

    def _remember(self, traffic: StepTraffic) -> None:
        if self._steps % self._stride == 0:
            self.history.append(traffic)
        if len(self.history) > _MAX_HISTORY:
            del self.history[1::2]
            self._stride *= 2
        self._steps += 1
        for index, value in enumerate(traffic[1:]):
            self._totals[index] += value
            self._maxima[index] = max(self._maxima[index], value)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero and self._steps:
            title = f"Gradient reductions of rank 0 in {self._steps} optimizer steps"
            print_table(title, _COLUMNS, self._summary(), right=range(1, len(_COLUMNS)))
            if self._skipped is not None and self._skipped.modules:
                rows = [
                    (name, _readable("bytes", nbytes / self._steps))
                    for name, nbytes in sorted(self._skipped.modules.items())
                ]
                title = "Modules that ran in Python: " + ("; ".join(self._skipped.reasons[:3]) or "unknown reason")
                print_table(title, ("module", "gathered per optimizer step"), rows, right=(1,))

    def _summary(self) -> list[tuple[str, ...]]:
        rows = []
        for index, name in enumerate(_QUANTITIES):
            total, maximum = self._totals[index], self._maxima[index]
            median = statistics.median(traffic[1 + index] for traffic in self.history)
            values = [_readable(name, value) for value in (total / self._steps, median, maximum)]
            # A sum of the peaks of different steps means nothing.
            rows.append((_TITLES[name], *values, "" if name == "held_bytes" else _readable(name, total)))
        return rows

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the four quantities over the optimizer steps.

        Args:
            path: Where to save the figure, in the format that its suffix names; None saves nothing.

        Returns:
            The figure, which no window shows.

        Raises:
            ValueError: If no step has been counted.
            ModuleNotFoundError: If matplotlib is not installed.
        """
        if not self.history:
            raise ValueError("`ReductionMonitor.plot` has nothing to draw: no optimizer step has been counted.")
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "`ReductionMonitor.plot` needs matplotlib. Install it with `pip install matplotlib`."
            ) from error
        figure = Figure(figsize=(8, 8), layout="constrained")
        steps = [traffic.step for traffic in self.history]
        axes = figure.subplots(len(_QUANTITIES), sharex=True)
        for axis, name in zip(axes, _QUANTITIES, strict=True):
            values = [getattr(traffic, name) for traffic in self.history]
            unit, size = _unit(name, max(values))
            axis.plot(steps, [value / size for value in values])
            axis.set_ylabel(f"{_TITLES[name]}\n[{unit}]" if unit else _TITLES[name])
            axis.set_ylim(bottom=0)
        axes[-1].set_xlabel("optimizer step")
        if path is not None:
            figure.savefig(path)
        return figure


# Units and their sizes, in descending order.
_BYTE_UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
_UNITS: dict[str, dict[str, float]] = {
    "collectives": {"": 1.0},
    "bytes": _BYTE_UNITS,
    "seconds": {"s": 1.0, "ms": 1e-3},
    "held_bytes": _BYTE_UNITS,
}


def _unit(name: str, value: float) -> tuple[str, float]:
    """The largest unit in which ``value`` is at least 1, else the smallest unit; and the unit's size."""
    units = _UNITS[name]
    return next(((unit, size) for unit, size in units.items() if value >= size), list(units.items())[-1])


def _readable(name: str, value: float) -> str:
    unit, size = _unit(name, value)
    digits = "1" if name == "collectives" else "3"
    return f"{value / size:,.{digits}f}".rstrip("0").rstrip(".") + (f" {unit}" if unit else "")
