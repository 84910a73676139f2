"""Shadow memory: the kernels that last read and wrote every byte of every storage."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zeroplus.testing.streams.clocks import Kernel, Stream

# A strided tensor with more pieces counts as one piece, from its first to its last byte.
_MOST_PIECES = 1024


class Span(NamedTuple):
    """Bytes of a storage.

    Attributes:
        start: The first byte.
        end: The byte after the last one.
    """

    start: int
    end: int


class Conflict(NamedTuple):
    """Two unordered accesses to the same bytes.

    Attributes:
        kind: ``"write-write"``, ``"write-read"`` (the later one in the program reads), ``"read-write"`` or
            ``"use-after-free"``.
        first: The access that comes first in the program.
        second: The other one.
        span: The bytes.
    """

    kind: str
    first: Kernel
    second: Kernel
    span: Span


def spans(tensor: Tensor) -> list[Span]:
    """The bytes of its storage that a strided tensor occupies, without the gaps between its rows."""
    size = tensor.element_size()
    if tensor.numel() == 0:
        return []
    dims = sorted((stride, length) for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    dims = [(stride, length) for stride, length in dims if stride and length > 1]  # not the expanded ones
    run = 1  # elements that lie one after the other
    while dims and dims[0][0] <= run:
        stride, length = dims.pop(0)
        run += stride * (length - 1)
    origin = int(tensor.storage_offset())
    starts = [origin]
    for stride, length in dims:
        if len(starts) * length > _MOST_PIECES:
            last = origin + sum(stride * (length - 1) for stride, length in dims) + run
            return [Span(origin * size, last * size)]
        starts = [start + index * stride for start in starts for index in range(length)]
    return [Span(start * size, (start + run) * size) for start in sorted(starts)]


class _Cell(NamedTuple):
    """The last write of some bytes, and the reads since then."""

    write: Kernel | None
    reads: dict[int, Kernel]  # the last read of each stream


class Shadow:
    """The history of one storage.

    Args:
        nbytes: Its size in bytes.
        allocated_on: The stream whose allocator owns the memory; None if it existed before the sanitizer.
        allocated_by: The operation that made it, for reports.
        previous: Accesses to freed storages, whose memory this storage may have got.

    Attributes:
        recorded: The streams that ``record_stream`` was called with.
    """

    def __init__(
        self,
        nbytes: int,
        allocated_on: Stream | None = None,
        allocated_by: str = "memory from before the sanitizer",
        previous: Iterable[Kernel] = (),
    ) -> None:
        self.nbytes = nbytes
        self.allocated_on = allocated_on
        self.allocated_by = allocated_by
        self.previous = list(previous)
        self.recorded: set[Stream] = set()
        self._starts = [0]
        self._cells = [_Cell(None, {})]

    def access(self, span: Span, kernel: Kernel, write: bool) -> Iterator[Conflict]:
        """Record that ``kernel`` reads or writes the bytes. It does so while it is iterated.

        Yields:
            A conflict for every earlier access to some of the bytes that may run at the same time.
        """
        for old in self.previous:
            if not kernel.is_after(old):
                yield Conflict("use-after-free", old, kernel, span)
        first, last = self._split(span.start), self._split(span.end)
        for index in range(first, last):
            cell = self._cells[index]
            part = Span(self._starts[index], self._starts[index + 1])
            if cell.write is not None and cell.write is not kernel and not kernel.is_after(cell.write):
                yield Conflict("write-write" if write else "write-read", cell.write, kernel, part)
            if not write:
                cell.reads[kernel.stream.index] = kernel
                continue
            for old in cell.reads.values():
                if old is not kernel and not kernel.is_after(old):
                    yield Conflict("read-write", old, kernel, part)
        if write:  # all bytes have the same history now
            self._starts[first:last] = [span.start]
            self._cells[first:last] = [_Cell(kernel, {})]

    def _split(self, at: int) -> int:
        """The index of the cell that starts at this byte; splits the cell around it if there is none."""
        index = bisect.bisect_left(self._starts, at)
        if index == len(self._starts) or self._starts[index] != at:
            cell = self._cells[index - 1]
            self._starts.insert(index, at)
            self._cells.insert(index, _Cell(cell.write, dict(cell.reads)))
        return index

    def accesses(self) -> Iterator[Kernel]:
        """The last accesses to every byte."""
        for cell in self._cells:
            if cell.write is not None:
                yield cell.write
            yield from cell.reads.values()


class _Freed(NamedTuple):
    """An access to memory that has been freed."""

    nbytes: int
    access: Kernel


class FreedMemory:
    """Accesses to freed storages, in whose place a caching allocator may put new ones.

    The allocator knows the order of its own stream only, and the streams of ``record_stream``, for which it waits.
    Another stream that uses the new storage must be told to wait, also for what its owner did in the old one.
    """

    def __init__(self) -> None:
        # By the streams that allocated and accessed the memory, without those that another one covers: with at least as
        # many bytes, and a later access.
        self._freed: dict[tuple[int, int], list[_Freed]] = {}

    def add(self, shadow: Shadow) -> None:
        """Keep the accesses to a storage that is freed, as far as new users of its memory must wait for them."""
        owner = shadow.allocated_on
        assert owner is not None
        for access in shadow.accesses():
            if access.stream is not owner and access.stream in shadow.recorded:
                continue
            known = self._freed.setdefault((owner.index, access.stream.index), [])
            if not any(old.nbytes >= shadow.nbytes and old.access.number >= access.number for old in known):
                known[:] = [old for old in known if old.nbytes > shadow.nbytes or old.access.number > access.number]
                known.append(_Freed(shadow.nbytes, access))

    def previous(self, stream: Stream, nbytes: int) -> list[Kernel]:
        """The last access of each stream that a new storage of ``nbytes`` on ``stream`` may meet in its memory."""
        return [
            max((old.access for old in known if old.nbytes >= nbytes), key=lambda access: access.number)
            for (owner, _), known in self._freed.items()
            if owner == stream.index and any(old.nbytes >= nbytes for old in known)
        ]


class Memory:
    """The shadows of all storages.

    Args:
        lifetime: Let a new storage inherit the accesses to freed storages, in whose place a caching allocator may
            put it.
    """

    def __init__(self, lifetime: bool) -> None:
        self._lifetime = lifetime
        self._shadows: dict[int, tuple[StorageWeakRef, Shadow]] = {}
        self._freed = FreedMemory()

    def of(self, tensor: Tensor) -> Shadow:
        """The shadow of the tensor's storage."""
        storage = tensor.untyped_storage()
        # While there is a weak reference the address is not reused, so the key is unique to this storage.
        found = self._shadows.get(storage._cdata)
        return found[1] if found is not None else self._add(tensor, Shadow(storage.nbytes()))

    def allocate(self, tensor: Tensor, stream: Stream, by: str) -> Shadow:
        """Add a new storage.

        Args:
            tensor: Its first tensor.
            stream: The current stream.
            by: The operation that made it.
        """
        storage = tensor.untyped_storage()
        if storage._cdata in self._shadows:
            return self.of(tensor)  # two outputs of one kernel
        self._collect()
        previous = self._freed.previous(stream, storage.nbytes())
        return self._add(tensor, Shadow(storage.nbytes(), stream, by, previous))

    def _add(self, tensor: Tensor, shadow: Shadow) -> Shadow:
        storage = tensor.untyped_storage()
        self._shadows[storage._cdata] = (StorageWeakRef(storage), shadow)
        return shadow

    def _collect(self) -> None:
        """Drop the shadows of freed storages."""
        for key in [key for key, (storage, _) in self._shadows.items() if storage.expired()]:
            shadow = self._shadows.pop(key)[1]
            if self._lifetime and shadow.allocated_on is not None:
                self._freed.add(shadow)
