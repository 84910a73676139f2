"""Convert any checkpoint to one safetensors file."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_zeroplus.checkpoint import atomic
from lightning_zeroplus.checkpoint.data_only import METADATA, load_data, read_metadata
from lightning_zeroplus.checkpoint.fragments import Fragment, read_fragments
from lightning_zeroplus.checkpoint.sources import TRAINER, WEIGHTS, FolderSource, open_file

_FSDP_WEIGHTS = "state_dict."
#: The names of dtypes in the file format, https://github.com/huggingface/safetensors#format.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def export(
    checkpoint: str | os.PathLike[str],
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    weights_only: bool = True,
) -> None:
    """Write the weights and buffers of a checkpoint to one safetensors file.

    The file has every name of the model's ``state_dict()``, including each name of a tied parameter, so that
    ``module.load_state_dict(safetensors.torch.load_file(path))`` works. It can also be the ``ckpt_path`` of any
    strategy of this package. The tensors of a sharded checkpoint are read one at a time. No process group is needed.

    Args:
        checkpoint: A folder that ``ZeroPlusStrategy`` (any stage, any number of ranks) or ``ZeroPlusFSDPStrategy`` has
            saved, or a plain Lightning checkpoint. If it has averaged weights (``WeightAveraging``), they are exported.
        path: The file, which is replaced atomically.
        dtype: Convert floating-point tensors to it. None: as in the checkpoint, which has the fp32 master weights of
            bf16 and fp16 training.
        weights_only: False unpickles whatever the checkpoint contains, and so may execute code from it.

    Raises:
        ValueError: If ``dtype`` is not a floating-point dtype.
        FileNotFoundError: If there is no checkpoint.
        RuntimeError: If it is damaged, or contains more than data.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"`dtype` must be a floating-point dtype or None, not {dtype!r}.")
    entries = list(_entries(atomic.readable(Path(checkpoint)), weights_only))
    target = Path(path)
    # A unique name: a script may export the same checkpoint on all ranks.
    staged = target.with_name(f".{target.name}.{uuid.uuid4().hex}.saving")
    try:
        _write(staged, entries, dtype)
        atomic.sync(staged)
        os.replace(staged, target)
        atomic.flush(target.parent)
    finally:
        staged.unlink(missing_ok=True)


def _entries(path: Path, weights_only: bool) -> Iterator[_Entry]:
    if not path.is_dir():
        yield from _whole(open_file(path, weights_only).weights)
    elif (path / METADATA).exists() and "zeroplus" not in load_data(path / TRAINER, weights_only):
        yield from _of_fsdp(path, read_metadata(path))
    else:
        folder = FolderSource(path, weights_only)
        if "state_dict" in folder.rest:
            yield from _whole(folder.rest["state_dict"])
        else:
            yield from _of_zero(folder)


def _whole(weights: dict[str, object]) -> Iterator[_Entry]:
    for name, value in weights.items():
        if isinstance(value, Tensor):
            yield _Entry(name, tuple(value.shape), value.dtype, lambda value=value: value)  # type: ignore[misc]


def _of_zero(folder: FolderSource) -> Iterator[_Entry]:
    first = folder.tied()
    for name, shape in folder.shapes().items():
        key = WEIGHTS + first.get(name, name)
        yield _stored(folder.path, folder.metadata, key, name, tuple(shape))
    yield from _whole(folder.extra(()))


def _of_fsdp(path: Path, metadata: Metadata) -> Iterator[_Entry]:
    for key, stored in metadata.state_dict_metadata.items():
        if key.startswith(_FSDP_WEIGHTS) and isinstance(stored, TensorStorageMetadata):
            yield _stored(path, metadata, key, key.removeprefix(_FSDP_WEIGHTS), tuple(stored.size))


def _stored(path: Path, metadata: Metadata, key: str, name: str, shape: tuple[int, ...]) -> _Entry:
    stored = metadata.state_dict_metadata.get(key)
    if stored is None:  # a parameter without elements
        return _Entry(name, shape, torch.float32, lambda: torch.empty(shape))
    assert isinstance(stored, TensorStorageMetadata)
    size, dtype = tuple(stored.size), stored.properties.dtype

    def read() -> Tensor:
        data = torch.empty(size, dtype=dtype)
        read_fragments(path, metadata, [Fragment(key, (0,) * len(size), size, data)])
        return data.view(shape)

    return _Entry(name, shape, dtype, read)


def _write(path: Path, entries: list[_Entry], dtype: torch.dtype | None) -> None:
    """Write tensor by tensor; the library's own writer needs all of them in memory."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    dtypes = [dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype for entry in entries]
    for entry, kind in zip(entries, dtypes, strict=True):
        end = begin + torch.Size(entry.shape).numel() * kind.itemsize
        header[entry.name] = {"dtype": _NAMES[kind], "shape": entry.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry, kind in zip(entries, dtypes, strict=True):
            data = entry.read().detach().to("cpu", kind).contiguous()
            file.write(data.flatten().view(torch.uint8).numpy().data)
