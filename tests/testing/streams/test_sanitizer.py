from __future__ import annotations

import gc
import json
from collections.abc import Callable

import pytest
import torch
from deepspeed.accelerator import get_accelerator, real_accelerator
from torch.autograd.function import BackwardCFunction
from torch.distributed import ProcessGroup
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_zeroplus.testing.streams import StreamRaceError, StreamSanitizer


def hooked(sanitizer: StreamSanitizer) -> None:
    """A gradient hook that sums on a stream of its own, and its caller, who waits for it."""
    side = sanitizer.stream("side")
    total = torch.zeros(8)
    sanitizer.name(total, "the total")
    weight = torch.ones(8, requires_grad=True)
    side.wait_stream(get_accelerator().current_stream())

    def add(param: torch.Tensor) -> None:
        side.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(side):
            total.add_(param.grad)

    weight.register_post_accumulate_grad_hook(add)
    (weight * 2).sum().backward()
    event = side.record_event()
    get_accelerator().current_stream().wait_event(event)
    total.mul_(2)


def test_each_forgotten_wait_that_matters_is_found() -> None:
    with StreamSanitizer() as sanitizer:
        hooked(sanitizer)
    sanitizer.check()
    assert sanitizer.report() == f"0 races in {len(sanitizer.device.kernels)} kernels"
    survivors = []
    for site in sanitizer.sites:
        with StreamSanitizer(drop=site) as mutated:
            hooked(mutated)
        if not mutated.races:
            survivors.append(site)
    assert len(sanitizer.sites) == 3
    assert [site.rsplit(" ", 1)[-1] for site in survivors] == ["hooked"]  # the wait within `add` makes it redundant
    assert "wait_stream" in survivors[0]


class _Engine:
    """Cyclic garbage that synchronizes the device when it is collected, as an engine does."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        get_accelerator().synchronize()


def test_garbage_of_an_earlier_test_does_not_hide_a_race() -> None:
    threshold = gc.get_threshold()
    try:
        gc.set_threshold(1)
        with StreamSanitizer() as sanitizer:
            total = torch.zeros(8)
            _Engine()
            garbage = [[] for _ in range(1000)]  # enough for a collection
            with sanitizer.on(sanitizer.stream("side")):
                total.add_(1)
        assert len(garbage) == 1000
        assert gc.isenabled()
        assert len(sanitizer.races) == 1
    finally:
        gc.set_threshold(*threshold)


def test_the_report_names_both_sites_the_buffer_and_the_bytes_once() -> None:
    with StreamSanitizer() as sanitizer:
        buffer = torch.zeros(8)
        sanitizer.name(buffer, "bucket 0")
        side = sanitizer.stream("side")
        side.wait_stream(sanitizer.device.current)
        for _ in range(3):
            buffer[2:].add_(1)
            with sanitizer.on(side):
                buffer[:4].sum()
    (race,) = (race for race in sanitizer.races if race.kind == "write-read")
    assert (race.buffer, race.span, race.times) == ("bucket 0", (8, 16), 3)
    assert (race.first.operation, race.first.stream) == ("aten::add_", "default")
    assert (race.second.operation, race.second.stream) == ("aten::sum", "side")
    assert race.first.location.startswith("streams/test_sanitizer.py:")
    with pytest.raises(StreamRaceError, match="bucket 0, bytes 8 to 16") as error:
        sanitizer.check()
    assert str(error.value) == sanitizer.report()


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.nonzero, None])
def test_a_host_that_reads_a_value_has_waited(read: Callable[[torch.Tensor], object] | None) -> None:
    with StreamSanitizer() as sanitizer:
        side = sanitizer.stream("side")
        buffer = torch.ones(1)
        if read is not None:
            read(buffer)
        with sanitizer.on(side):
            buffer.add_(1)
    assert bool(sanitizer.races) == (read is None)


def reuse(sanitizer: StreamSanitizer, how: str) -> None:
    side = sanitizer.stream("side")
    scratch = torch.ones(64)
    side.wait_stream(sanitizer.device.current)
    with sanitizer.on(side):
        scratch.sum()
    if how == "recorded":
        scratch.record_stream(side)
    if how == "joined":
        sanitizer.device.current.wait_stream(side)
    del scratch
    buffer = torch.empty(32)
    if how == "joined before the first write":
        sanitizer.device.current.wait_stream(side)
    buffer.fill_(0)


@pytest.mark.parametrize(
    ("how", "found"), [("nothing", 1), ("recorded", 0), ("joined", 0), ("joined before the first write", 0)]
)
def test_memory_that_a_stream_still_uses_when_it_is_given_away(how: str, found: int) -> None:
    with StreamSanitizer(lifetime=True) as sanitizer:
        reuse(sanitizer, how)
    assert [race.kind for race in sanitizer.races] == ["use-after-free"] * found
    with StreamSanitizer() as sanitizer:
        reuse(sanitizer, how)
    sanitizer.check()  # not asked for


@pytest.mark.parametrize(("how", "found"), [("nothing", 1), ("recorded", 1), ("joined", 0)])
def test_another_stream_gets_memory_that_its_owner_still_uses(how: str, found: int) -> None:
    with StreamSanitizer(lifetime=True) as sanitizer:
        side = sanitizer.stream("side")
        scratch = torch.ones(64)
        scratch.sum()  # in order, for whatever its own stream puts there
        del scratch
        buffer = torch.empty(32)
        if how == "recorded":
            buffer.record_stream(side)  # this is about when it is given back
        if how == "joined":
            side.wait_stream(sanitizer.device.current)
        with sanitizer.on(side):
            buffer.fill_(0)
    assert [race.kind for race in sanitizer.races] == ["use-after-free"] * found


def test_autograd_records_the_gradients_that_it_hands_to_other_streams() -> None:
    with StreamSanitizer(lifetime=True) as sanitizer:
        side = sanitizer.stream("side")
        weight = torch.ones(64, requires_grad=True)
        side.wait_stream(sanitizer.device.current)
        with sanitizer.on(side):
            y = weight.sin()
        sanitizer.device.current.wait_stream(side)
        y.exp().sum().backward()
        torch.zeros(64)
    sanitizer.check()


def snapshot() -> list[object]:
    return [
        real_accelerator.ds_accelerator,
        torch.autograd.Variable._execution_engine,
        BackwardCFunction.__init__,
        torch.Tensor.record_stream,
        "record_stream" in vars(torch.Tensor),
        dict(vars(ProcessGroup)),
        dict(vars(torch._C._distributed_c10d.Work)),
        _get_current_dispatch_mode_stack(),
        _get_current_function_mode_stack(),
    ]


@pytest.mark.parametrize("error", [None, KeyError])
def test_nothing_stays_patched(error: type[Exception] | None) -> None:
    get_accelerator()
    before = snapshot()
    try:
        with StreamSanitizer():
            assert all(ours != theirs for ours, theirs in zip(snapshot()[:4], before[:4], strict=True))
            if error is not None:
                raise error
    except KeyError:
        pass
    assert snapshot() == before


def test_one_at_a_time() -> None:
    with StreamSanitizer():
        with pytest.raises(RuntimeError, match="Another StreamSanitizer"), StreamSanitizer():
            pass
    with StreamSanitizer():
        pass


def test_the_schedule_overlaps_what_nothing_orders(tmp_path) -> None:
    with StreamSanitizer() as sanitizer:
        side = sanitizer.stream("side")
        a, b = torch.ones(4), torch.ones(4)
        sanitizer.clear()
        a.add_(1)
        with sanitizer.on(side):
            b.add_(1)
            b.add_(1)
        a.add_(1)
        side.wait_stream(sanitizer.device.current)
        with sanitizer.on(side):
            a.mul_(b)
    seconds = {"aten::add_": 2.0, "aten::mul_": 3.0}
    trace, picture = tmp_path / "trace.json", tmp_path / "schedule.png"
    assert sanitizer.timeline(lambda kernel: seconds[kernel.name], trace, picture) == 2 + 2 + 3
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in events] == [
        ("aten::add_", 0, 2e6),
        ("aten::add_", 0, 2e6),
        ("aten::add_", 2e6, 2e6),
        ("aten::add_", 2e6, 2e6),
        ("aten::mul_", 4e6, 3e6),
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")
