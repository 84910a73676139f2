"""The table of a plan, and what it recommends; bytes, rates and times as people write them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from lightning_zeroplus.plan.choose import Job, best
from lightning_zeroplus.plan.estimate import PURPOSES, Estimate, Link
from lightning_zeroplus.plan.model import Model, elements
from lightning_zeroplus.table import print_table


class Machine(NamedTuple):
    """What a strategy has to fit.

    Attributes:
        memory: Bytes of a device.
        activations: Bytes that activations need.
        link: The network.
    """

    memory: int
    activations: int
    link: Link


def report(model: Model, job: Job, machine: Machine, estimates: Sequence[Estimate]) -> Estimate | None:
    """Print the table, and the recommendation below it.

    Returns:
        The recommended strategy; None: nothing fits.
    """
    chosen = best(estimates, machine.memory, machine.link, machine.activations)
    many = "s" if job.backwards > 1 else ""
    print_table(
        f"Bytes per rank: {elements(model.weights):,} parameters ({elements(model.trained):,} trained) in"
        f" {model.precision} on {job.ranks:,} GPUs of {show_bytes(machine.memory)}",
        ("strategy", *PURPOSES, "total", "at", "host", "fits"),
        [_memory(each, machine) for each in estimates],
        right=(*range(1, 2 + len(PURPOSES)), 3 + len(PURPOSES)),
    )
    print_table(
        f"On the wire, per step of {job.backwards} backward{many}",
        ("strategy", "collectives", "gradients", "weights", "sent by a rank", "time", "of which nothing hides"),
        [_wire(each, machine.link) for each in estimates],
        right=range(1, 7),
    )
    print(_advice(chosen, estimates, machine))
    for note in dict.fromkeys(note for each in estimates for note in each.notes):
        print(f"note: {note}")
    if model.units is None:
        print(f"note: zeroplus_fsdp cannot shard this module: {model.no_units}")
    if not machine.activations:
        print("note: activations are not counted; give them with --activations")
    return chosen


def _title(each: Estimate) -> str:
    return each.strategy.removeprefix("zeroplus_") + (" window" if each.window else "")


def _memory(each: Estimate, machine: Machine) -> tuple[str, ...]:
    most = each.moments[each.moment]
    return (
        _title(each),
        *(show_bytes(most.get(purpose, 0)) for purpose in PURPOSES),
        show_bytes(each.peak + machine.activations),
        each.moment,
        show_bytes(each.host),
        "yes" if each.peak + machine.activations <= machine.memory else "no",
    )


def _wire(each: Estimate, link: Link) -> tuple[str, ...]:
    weights = sum(collective.payload for collective in each.collectives if collective.of == "weights")
    return (
        _title(each),
        f"{sum(collective.number for collective in each.collectives):,}",
        show_bytes(each.reduced),
        show_bytes(weights),
        show_bytes(each.sent),
        show_seconds(each.seconds(link)),
        show_seconds(each.exposed(link)),
    )


def _advice(chosen: Estimate | None, estimates: Sequence[Estimate], machine: Machine) -> str:
    if chosen is None:
        least = min(estimates, key=lambda each: each.peak)
        return (
            f"Nothing fits: {_title(least)} needs the least, {show_bytes(least.peak + machine.activations)} of"
            f" {show_bytes(machine.memory)}. Use more GPUs, or a smaller model."
        )
    seconds = show_seconds(chosen.seconds(machine.link))
    window = ", with its backwards in `coalesce()`" if chosen.window else ""
    reason = f"it needs {show_bytes(chosen.peak + machine.activations)} of {show_bytes(machine.memory)}"
    if chosen.host:
        reason += ", and nothing fits with the optimizer's states on the device"
    faster = [
        _title(each)
        for each in estimates
        if each.seconds(machine.link) < chosen.seconds(machine.link)
        and each.peak + machine.activations > machine.memory
    ]
    if faster:
        reason += f"; {', '.join(faster)} would send less, and does not fit"
    return f"Take {chosen.strategy}{window}: of what fits it is cheapest on the wire, {seconds} per step; {reason}."


def as_json(model: Model, job: Job, machine: Machine, estimates: Sequence[Estimate]) -> str:
    """The same as one JSON object."""
    chosen = best(estimates, machine.memory, machine.link, machine.activations)
    rows = [
        {
            "strategy": each.strategy,
            "window": each.window,
            "bytes": each.peak + machine.activations,
            "moment": each.moment,
            "by_moment": {moment: dict(sizes) for moment, sizes in each.moments.items()},
            "between_steps": each.between,
            "host_bytes": each.host,
            "collectives": [collective._asdict() for collective in each.collectives],
            "sent_bytes": each.sent,
            "wire_seconds": each.seconds(machine.link),
            "not_hidden_seconds": each.exposed(machine.link),
            "fits": each.peak + machine.activations <= machine.memory,
            "recommended": each is chosen,
            "notes": each.notes,
        }
        for each in estimates
    ]
    summary = {"parameters": elements(model.weights), "precision": model.precision, **job._asdict()}
    return json.dumps({**summary, "memory": machine.memory, "strategies": rows}, indent=1)


# -- quantities ----------------------------------------------------------------------------------------------------

_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = {f"{name}B": size for name, size in {**_PREFIXES, **_BINARY}.items()}
_RATES = {f"{name}bit": size / 8 for name, size in {**_PREFIXES, **_BINARY}.items()} | _BYTES
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def parse_bytes(text: str) -> int:
    """``80GiB`` or ``80GB``.

    Raises:
        ValueError: If it is no size, naming the units.
    """
    return int(_parse(text, _BYTES, "80GiB"))


def parse_rate(text: str) -> float:
    """Bytes per second: ``400Gbit``, ``50GB``, also with ``/s``.

    Raises:
        ValueError: If it is no rate, naming the units.
    """
    return _parse(text.removesuffix("/s"), _RATES, "400Gbit")


def parse_time(text: str) -> float:
    """Seconds: ``20us``.

    Raises:
        ValueError: If it is no time, naming the units.
    """
    return _parse(text, _TIMES, "20us", may_be_zero=True)


def _parse(text: str, units: dict[str, float] | dict[str, int], example: str, may_be_zero: bool = False) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r}: give a number and one of the units {', '.join(units)}, such as {example}")
    value = float(match[1]) * units[match[2]]
    if not value and not may_be_zero:
        raise ValueError(f"{text!r}: give a positive number, such as {example}")
    return value


def show_bytes(size: float) -> str:
    """``12.3 GiB``."""
    return _show(size, {name + "B": unit for name, unit in reversed(_BINARY.items())}, "B")


def show_seconds(seconds: float) -> str:
    """``12.3 ms``."""
    return _show(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6}, "s") if seconds else "0"


def _show(value: float, units: dict[str, float] | dict[str, int], smallest: str) -> str:
    for name, unit in units.items():
        if value >= unit:
            number = value / unit
            return f"{number:.3g} {name}" if number < 999.5 else f"{number:,.0f} {name}"
    return f"{value:.0f} {smallest}" if value else ""
