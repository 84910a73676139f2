from __future__ import annotations

import pytest

from lightning_zeroplus.testing.streams.clocks import PATIENCE, Device, Event, Stream
from lightning_zeroplus.testing.streams.locations import Location

HERE = Location("here.py", 1, "test")


def test_kernels_of_one_stream_are_in_order_and_of_two_are_not() -> None:
    device = Device()
    side = Stream(device)
    first = device.launch("first", HERE)
    other = device.launch("other", HERE, stream=side)
    second = device.launch("second", HERE)
    assert second.is_after(first)
    assert not first.is_after(second)
    assert not other.is_after(first) and not second.is_after(other)


def test_waiting_is_transitive_and_covers_the_past_only() -> None:
    device = Device()
    a, b = Stream(device), Stream(device)
    first = device.launch("first", HERE)
    a.wait_stream(device.default)
    late = device.launch("late", HERE)
    b.wait_stream(a)
    last = device.launch("last", HERE, stream=b)
    assert last.is_after(first)
    assert not last.is_after(late)


def test_an_event_is_the_moment_of_its_recording() -> None:
    device = Device()
    side = Stream(device)
    before = device.launch("before", HERE)
    event = device.default.record_event()
    after = device.launch("after", HERE)
    side.wait_event(event)
    waited = device.launch("waited", HERE, stream=side)
    assert waited.is_after(before)
    assert not waited.is_after(after)


def test_an_event_that_was_never_recorded_delays_nobody() -> None:
    device = Device()
    side = Stream(device)
    before = device.launch("before", HERE)
    Event(device).wait(side)
    assert not device.launch("after", HERE, stream=side).is_after(before)


@pytest.mark.parametrize("how", ["stream", "event", "device"])
def test_what_the_host_waited_for_is_before_every_later_kernel(how: str) -> None:
    device = Device()
    side = Stream(device)
    before = device.launch("before", HERE)
    event = device.default.record_event()
    unordered = device.launch("unordered", HERE, stream=side)
    {
        "stream": device.default.synchronize,
        "event": event.synchronize,
        "device": device.synchronize,
    }[how]()
    assert device.launch("after", HERE, stream=side).is_after(before)
    assert not unordered.is_after(before)
    assert event.query()


@pytest.mark.parametrize("what", ["stream", "event"])
def test_a_host_that_asks_learns_nothing_until_it_has_asked_for_long(what: str) -> None:
    """DeepSpeed drops old events that are over, and goes on if they are not: that orders nothing."""
    device = Device()
    side = Stream(device)
    before = device.launch("before", HERE)
    asked = device.default if what == "stream" else device.default.record_event()
    assert not asked.query()
    assert not device.launch("after", HERE, stream=side).is_after(before)
    assert any(asked.query() for _ in range(PATIENCE))
    assert device.launch("at last", HERE, stream=side).is_after(before)


def test_a_dropped_synchronization_does_nothing_and_is_listed() -> None:
    def program(device: Device) -> bool:
        side = Stream(device)
        before = device.launch("before", HERE)
        side.wait_stream(device.default)
        return device.launch("after", HERE, stream=side).is_after(before)

    seen = Device()
    assert program(seen)
    (site,) = seen.sites
    assert "wait_stream" in site and "test_clocks.py" in site
    assert not program(Device(drop=site))


def test_the_current_stream_is_restored() -> None:
    device = Device()
    side = Stream(device)
    with device.on(side):
        with device.on(None):
            assert device.current is side
        assert device.current is side
    assert device.current is device.default
