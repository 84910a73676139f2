"""Parts of tensors in a folder: every rank writes the parts that it has, and reads the parts that it needs.

The files have the format of ``torch.distributed.checkpoint``, whose metadata locates each part of a tensor. A part that
is read may overlap any number of parts that were written. So another number of ranks, or another partition of a
tensor, needs no conversion. Only this module, and :mod:`.data_only` with the checks, know the format.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_zeroplus.checkpoint.data_only import DataOnlyReader, read_metadata
from lightning_zeroplus.checkpoint.everywhere import errors_of_torch
from lightning_zeroplus.checkpoint.places.address import Files
from lightning_zeroplus.checkpoint.places.files import writer_to


class Fragment(NamedTuple):
    """A rectangular part of a tensor.

    Attributes:
        key: The tensor's name in the checkpoint.
        offsets: Index of the part's first element, per dimension of the tensor.
        shape: The tensor's shape.
        data: The part itself, on any device.
    """

    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    data: Tensor

    @property
    def place(self) -> MetadataIndex:
        return MetadataIndex(self.key, self.offsets)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.data.shape)


def save_fragments(folder: Files, fragments: Iterable[Fragment], group: Any = None) -> None:
    """Write the fragments of all ranks to ``folder``, and flush them to the disk. Duplicates are written once.

    Args:
        folder: Where to write.
        fragments: This rank's.
        group: The process group of all ranks; None: the default group.

    Raises:
        RuntimeError: On all ranks, if any rank failed, with the error of the lowest such rank.
        KeyboardInterrupt: On all ranks, if Ctrl-C came while any rank wrote.
    """
    writer, planner = writer_to(folder), _SavePlanner(fragments)
    with errors_of_torch("The checkpoint could not be saved"):
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group)


class StoredTensor(NamedTuple):
    """A tensor in a folder."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredTensors(Mapping[str, StoredTensor]):
    """The tensors that the ranks have written to a folder, by name.

    Args:
        folder: What :func:`save_fragments`, or ``torch.distributed.checkpoint``, has written.

    Raises:
        RuntimeError: If a file is missing, damaged or too short, naming it.
    """

    def __init__(self, folder: Files) -> None:
        self.folder = folder
        self._metadata = read_metadata(folder)
        self._stored = {
            key: StoredTensor(tuple(stored.size), stored.properties.dtype)
            for key, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def __getitem__(self, key: str) -> StoredTensor:
        return self._stored[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def read(self, fragments: Iterable[Fragment]) -> None:
        """Fill ``data`` of each fragment, on this rank only; without communication.

        Raises:
            RuntimeError: If a file is damaged.
        """
        reader, planner = _KnownReader(self.folder, self._metadata), _LoadPlanner(fragments)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            with errors_of_torch(f"The checkpoint {str(self.folder)!r} is damaged"):
                dcp.load({}, storage_reader=reader, planner=planner, no_dist=True)

    def whole(self, key: str) -> Tensor:
        """Read a whole tensor, on this rank only."""
        shape, dtype = self[key]
        data = torch.empty(shape, dtype=dtype)
        self.read([Fragment(key, (0,) * len(shape), shape, data)])
        return data


class _KnownReader(DataOnlyReader):
    """Uses metadata that has been read before."""

    def __init__(self, folder: Files, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _SavePlanner(dcp.DefaultSavePlanner):
    def __init__(self, fragments: Iterable[Fragment]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._fragments = {fragment.place: fragment for fragment in fragments}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(fragment) for fragment in self._fragments.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._fragments[index].data


def _write_item(fragment: Fragment) -> WriteItem:
    properties = TensorProperties(dtype=fragment.data.dtype)
    data = TensorWriteData(fragment.chunk, properties, torch.Size(fragment.shape))
    return WriteItem(fragment.place, WriteItemType.SHARD, tensor_data=data)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def __init__(self, fragments: Iterable[Fragment]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._fragments = {fragment.place: fragment for fragment in fragments}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for fragment in self._fragments.values():
            stored = self.metadata.state_dict_metadata[fragment.key]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(fragment.key, stored, [fragment.chunk])
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("fragments are tensors")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.offset is not None
        part = self._fragments[MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)].data
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dimension, start, length)
        return part
