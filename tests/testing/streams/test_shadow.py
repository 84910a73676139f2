from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_zeroplus.testing.streams.clocks import Device, Kernel, Stream
from lightning_zeroplus.testing.streams.locations import Location
from lightning_zeroplus.testing.streams.shadow import Shadow, Span, spans


def kernel(device: Device, stream: Stream) -> Kernel:
    return device.launch("kernel", Location("here.py", 1, "test"), stream=stream)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda x: x, [(0, 96)]),
        (lambda x: x.t(), [(0, 96)]),
        (lambda x: x[1], [(24, 48)]),
        (lambda x: x[:, 1:3], [(4, 12), (28, 36), (52, 60), (76, 84)]),
        (lambda x: x[::2, 0], [(0, 4), (48, 52)]),
        (lambda x: x[0, 0].expand(5, 7), [(0, 4)]),
        (lambda x: x.as_strided((3, 4), (2, 1)), [(0, 32)]),
        (lambda x: x[2:2], []),
    ],
)
def test_the_bytes_of_a_view(view, expected) -> None:
    assert spans(view(torch.zeros(4, 6))) == [Span(*span) for span in expected]


def test_too_many_pieces_count_as_one() -> None:
    assert spans(torch.zeros(2000, 2)[:, 0]) == [Span(0, 1999 * 8 + 4)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_the_bytes_of_random_views(shape: list[int], data: st.DataObject) -> None:
    whole = torch.zeros(torch.Size(shape).numel(), dtype=torch.int16)
    view = whole.view(shape)
    for dim, length in enumerate(shape):
        start = data.draw(st.integers(0, length - 1))
        view = view[(slice(None),) * dim + (slice(start, None, data.draw(st.integers(1, 3))),)]
    view.fill_(1)
    touched = {byte for span in spans(view.permute(*reversed(range(view.ndim)))) for byte in range(*span)}
    assert touched == {2 * index + byte for index in whole.nonzero().flatten().tolist() for byte in (0, 1)}


@pytest.mark.parametrize(
    ("first_writes", "second_writes", "kind"),
    [(True, True, "write-write"), (True, False, "write-read"), (False, True, "read-write"), (False, False, None)],
)
@pytest.mark.parametrize("wait", [True, False])
def test_unordered_accesses_conflict_unless_both_read(first_writes, second_writes, kind, wait) -> None:
    device = Device()
    side = Stream(device)
    shadow = Shadow(100)
    assert not list(shadow.access(Span(0, 60), kernel(device, device.default), first_writes))
    if wait:
        side.wait_stream(device.default)
    conflicts = list(shadow.access(Span(40, 100), kernel(device, side), second_writes))
    expected = [] if wait or kind is None else [(kind, Span(40, 60))]
    assert [(conflict.kind, conflict.span) for conflict in conflicts] == expected


def test_neighbors_do_not_conflict() -> None:
    device = Device()
    shadow = Shadow(100)
    assert not list(shadow.access(Span(0, 50), kernel(device, device.default), True))
    assert not list(shadow.access(Span(50, 100), kernel(device, Stream(device)), True))


def test_a_writer_waits_for_the_readers_of_all_streams() -> None:
    device = Device()
    readers = [Stream(device) for _ in range(3)]
    shadow = Shadow(10)
    for reader in readers:
        assert not list(shadow.access(Span(0, 10), kernel(device, reader), False))
    device.default.wait_stream(readers[0])
    device.default.wait_stream(readers[2])
    (conflict,) = shadow.access(Span(0, 10), kernel(device, device.default), True)
    assert conflict.first.stream is readers[1]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 7), st.integers(1, 8), st.integers(0, 3)),
        max_size=12,
    )
)
def test_the_first_race_of_a_random_program_is_found(program: list[tuple[int, bool, int, int, int]]) -> None:
    device = Device()
    streams = [device.default, Stream(device), Stream(device)]
    shadow = Shadow(16)
    history: list[tuple[Kernel, bool, set[int]]] = []
    for index, write, start, length, waits in program:
        if waits < 3:
            streams[index].wait_stream(streams[waits])
        new = kernel(device, streams[index])
        span = Span(start, start + length)
        touched = set(range(*span))
        races = any((write or wrote) and there & touched and not new.is_after(old) for old, wrote, there in history)
        assert races == bool(list(shadow.access(span, new, write)))
        if races:
            return
        history.append((new, write, touched))
