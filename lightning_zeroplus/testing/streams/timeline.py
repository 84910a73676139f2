"""The schedule of simulated kernels, for given durations, as numbers and as pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_zeroplus.testing.streams.clocks import Kernel


class Scheduled(NamedTuple):
    """A kernel and when it runs.

    Attributes:
        kernel: The kernel.
        start: Seconds from the beginning.
        end: Seconds from the beginning.
    """

    kernel: Kernel
    start: float
    end: float


def schedule(kernels: Iterable[Kernel], durations: Callable[[Kernel], float]) -> list[Scheduled]:
    """Start each kernel as soon as every kernel in its clock is finished; unknown kernels count as finished."""
    ends: dict[tuple[int, int], float] = {}
    result = []
    for kernel in kernels:
        start = max((ends.get(key, 0.0) for key in kernel.after.items()), default=0.0)
        end = start + durations(kernel)
        ends[kernel.stream.index, kernel.number] = end
        result.append(Scheduled(kernel, start, end))
    return result


def write_trace(scheduled: Sequence[Scheduled], path: Path) -> None:
    """Write Chrome's trace event format: one row per stream, times in microseconds."""
    streams = {each.kernel.stream.index: each.kernel.stream.name for each in scheduled}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": index, "args": {"name": name}}
        for index, name in streams.items()
    ]
    events += [
        {
            "ph": "X",
            "name": kernel.name,
            "pid": 0,
            "tid": kernel.stream.index,
            "ts": start * 1e6,
            "dur": (end - start) * 1e6,
            "args": {"location": str(kernel.location), "bytes": kernel.nbytes},
        }
        for kernel, start, end in scheduled
    ]
    path.write_text(json.dumps({"traceEvents": events}))


def draw(scheduled: Sequence[Scheduled], path: Path) -> None:
    """Draw a Gantt chart: one row per stream, with collectives in another color."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    streams = list({each.kernel.stream.index: each.kernel.stream.name for each in scheduled}.items())
    figure = Figure(figsize=(12, 1 + 0.5 * len(streams)), layout="constrained")
    axes = figure.add_subplot()
    for row, (index, _) in enumerate(streams):
        for prefix, color in ((("aten::",), "tab:blue"), (("c10d::", "_c10d_functional::"), "tab:orange")):
            bars = [
                (start, end - start)
                for kernel, start, end in scheduled
                if kernel.stream.index == index and kernel.name.startswith(prefix) and end > start
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(streams)), [name for _, name in streams])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    FigureCanvasAgg(figure).print_png(str(path))
