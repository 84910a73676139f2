"""Convert any checkpoint to one file: safetensors, or a Lightning checkpoint."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_zeroplus.checkpoint import atomic, names, whole_states
from lightning_zeroplus.checkpoint.data_only import METADATA, load_data
from lightning_zeroplus.checkpoint.fabric.opened import FabricCheckpoint
from lightning_zeroplus.checkpoint.fragments import StoredTensors
from lightning_zeroplus.checkpoint.places.address import Address, Files, errors_of_store, files_at
from lightning_zeroplus.checkpoint.places.place import place_of
from lightning_zeroplus.checkpoint.saving.frozen import FROZEN, cannot_export
from lightning_zeroplus.checkpoint.sources import FABRIC, OTHERS, TRAINER, WEIGHTS, FolderSource, open_file

_FSDP_WEIGHTS = "state_dict."
#: The weights that are trained, in a checkpoint of `WeightAveraging`.
_CURRENT = "current_model_state"
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
    optimizer: bool = False,
    weights_only: bool = True,
    model: str | None = None,
) -> None:
    """Write a checkpoint to one file, which needs neither this package nor a process group.

    The file has every name of the model's ``state_dict()``, including each name of a tied parameter. It can be the
    ``ckpt_path`` of any strategy of this package. No process group is needed.

    - ``model.safetensors``: weights and buffers, for ``module.load_state_dict(safetensors.torch.load_file(path))``. The
      tensors of a sharded checkpoint are read one at a time.
    - ``model.ckpt``: a Lightning checkpoint, for ``Module.load_from_checkpoint(path)``, which rebuilds the module with
      its hyperparameters. With ``optimizer=True`` a fit goes on from it under DDP and other strategies that read whole
      tensors. The whole content is in memory once.

    Args:
        checkpoint: A folder that ``ZeroPlusStrategy`` (any stage, any number of ranks) or ``ZeroPlusFSDPStrategy`` has
            saved, a plain Lightning checkpoint, or what ``fabric.save`` has saved under any strategy. If it has
            averaged weights (``WeightAveraging``), they are exported. It may be at an address, such as
            ``s3://bucket/last.ckpt``.
        path: The file, which is replaced atomically; its suffix is ``.safetensors`` or ``.ckpt``. To an address it is
            copied from a temporary file.
        dtype: Convert floating-point weights to it. None: as in the checkpoint, which has the fp32 master weights of
            bf16 and fp16 training.
        optimizer: Also write what a fit needs to go on: states of optimizers, schedules and callbacks. Without it a
            ``.ckpt`` is as one that Lightning saves with ``weights_only=True``.
        weights_only: False unpickles whatever the checkpoint contains, and so may execute code from it.
        model: For a checkpoint of ``fabric.save``: the name of the model in its ``state``. None: the only one.

    Raises:
        ValueError: If ``dtype`` is not a floating-point dtype, ``path`` has another suffix, there are no optimizer
            states to write, it is not clear which model is meant, the checkpoint was saved with ``save_frozen=False``,
            or an address cannot be used.
        FileNotFoundError: If there is no checkpoint.
        IsADirectoryError: If ``path`` is a folder, or the address of a checkpoint of several files.
        RuntimeError: If it is damaged, or contains more than data.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"`dtype` must be a floating-point dtype or None, not {dtype!r}.")
    target = files_at(path)
    if target.suffix not in (".safetensors", ".ckpt"):
        raise ValueError(
            f"`zp.export(path={os.fspath(path)!r})`: the suffix says what to write. Use `.safetensors` for weights and"
            " buffers, or `.ckpt` for a Lightning checkpoint."
        )
    if optimizer and target.suffix != ".ckpt":
        raise ValueError("`zp.export(optimizer=True)`: a safetensors file has weights only. Use the suffix `.ckpt`.")
    stored = _open(place_of(checkpoint).readable(), weights_only, model)
    entries = list(stored.weights(averaged=True))
    with _staged(target) as staged:
        if target.suffix == ".ckpt":
            torch.save(_lightning(stored, entries, dtype, optimizer), staged)
        else:
            _write(staged, entries, dtype)


@contextmanager
def _staged(target: Files) -> Iterator[Path]:
    """A local file, which replaces the target at the end."""
    if isinstance(target, Address):
        if place_of(str(target)).readable().is_dir():
            raise IsADirectoryError(
                f"There is a checkpoint of several files at {str(target)!r}. Choose another address."
            )
        with tempfile.TemporaryDirectory(prefix="zeroplus-") as folder:
            yield Path(folder, "exported")
            with errors_of_store(target, "written"):
                target.put_file(Path(folder, "exported"))
        return
    # A unique name: a script may export the same checkpoint on all ranks.
    staged = target.with_name(f".{target.name}.{uuid.uuid4().hex}.saving")
    try:
        yield staged
        atomic.sync(staged)
        os.replace(staged, target)
        atomic.flush(target.parent)
    finally:
        staged.unlink(missing_ok=True)


class _Stored(NamedTuple):
    """A checkpoint of any kind.

    Attributes:
        rest: What the Trainer and its callbacks restore.
        weights: Its weights and buffers; ``averaged=False``: those that are trained, even if it has averaged ones.
        optimizers: Its optimizer states.
        has_ema: Whether it has the averages of ``EMA``.
        others: What else the module's ``state_dict()`` has, such as an ``_extra_state``.
    """

    rest: dict[str, Any]
    weights: Callable[..., Iterator[_Entry]]
    optimizers: Callable[[], list[dict[str, Any]]]
    has_ema: bool
    others: Mapping[str, Any]


def _open(path: Files, weights_only: bool, model: str | None) -> _Stored:
    if model is not None:
        return _of_fabric(FabricCheckpoint(path, weights_only), model)
    if not path.is_dir():
        file = open_file(path, weights_only)

        def whole(averaged: bool) -> Iterator[_Entry]:
            return _whole(file.weights | (file.rest.get(names.AVERAGES, {}) if averaged else {}))

        has_ema = names.AVERAGES in file.rest
        return _Stored(file.rest, whole, lambda: _of_file(path, file.rest), has_ema, _others(file.weights))
    ours: dict[str, Any] | None = {}
    if (path / METADATA).exists():
        rest = load_data(path / TRAINER, weights_only)
        ours = rest.get("zeroplus")
    if ours is None:
        if FROZEN in rest:
            raise ValueError(cannot_export(path, rest[FROZEN]))
        tensors = StoredTensors(path)
        if any(key.startswith(f"{_CURRENT}.") for key in tensors):
            rest[_CURRENT] = {}
        others, has_ema = rest.pop(OTHERS, {}), names.are_averaged(tensors)
        own, of_model = partial(_of_fsdp, tensors, others), _others(others.get("state_dict", {}))
        return _Stored(rest, own, partial(whole_states.of_fsdp, path), has_ema, of_model)
    if ours.get("format") == FABRIC:
        return _of_fabric(FabricCheckpoint(path, weights_only), None)
    folder = FolderSource(path, weights_only)
    if folder.frozen:
        raise ValueError(cannot_export(path, folder.frozen))

    def weights(averaged: bool) -> Iterator[_Entry]:
        is_averaged = averaged and folder.has_averaged_weights
        return _whole(folder.rest["state_dict"]) if is_averaged else _of_zero(folder, averaged)

    rest = folder.rest | whole_states.scaler_of_zero(folder)
    others, has_ema = _others(folder.extra(())), names.are_averaged(folder.tensors)
    return _Stored(rest, weights, lambda: whole_states.of_zero(folder), has_ema, others)


def _of_fabric(checkpoint: FabricCheckpoint, model: str | None) -> _Stored:
    found = list(checkpoint.models)
    if model is None and len(found) == 1:
        (model,) = found
    if model is None:
        raise ValueError(
            f"The checkpoint {str(checkpoint.path)!r} has the models {', '.join(map(repr, found)) or 'None'}. Say which"
            " one, as `export(checkpoint, path, model='...')`."
        )
    if model in checkpoint.models:
        source = checkpoint.models[model]
        return _Stored({}, partial(_of_zero, source), list, has_ema=False, others=_others(source.extra(())))
    whole = checkpoint.model(model).extra(())
    return _Stored({}, lambda averaged: _whole(whole), list, has_ema=False, others=_others(whole))


def _of_file(path: Files, rest: dict[str, Any]) -> list[dict[str, Any]]:
    if not rest.get("optimizer_states"):
        raise ValueError(whole_states.has_none(path))
    states: list[dict[str, Any]] = rest["optimizer_states"]
    return states


def _whole(weights: Mapping[str, Any]) -> Iterator[_Entry]:
    for name, value in weights.items():
        if isinstance(value, Tensor):
            yield _Entry(name, tuple(value.shape), value.dtype, lambda value=value: value)  # type: ignore[misc]


def _others(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in weights.items() if not isinstance(value, Tensor)}


def _of_zero(folder: FolderSource, averaged: bool) -> Iterator[_Entry]:
    first = folder.tied()
    for name, shape in folder.shapes().items():
        key = folder.prefix + names.of_zero(first.get(name, name))
        if not averaged or key not in folder.tensors:
            key = folder.prefix + WEIGHTS + first.get(name, name)
        yield _stored(folder.tensors, key, name, tuple(shape))
    yield from _whole(folder.extra(()))


def _of_fsdp(tensors: StoredTensors, others: Mapping[str, Any], averaged: bool) -> Iterator[_Entry]:
    trained = f"{_CURRENT}."
    prefix = _FSDP_WEIGHTS if averaged or not any(key.startswith(trained) for key in tensors) else trained
    for key, stored in tensors.items():
        if key.startswith(prefix):
            name = key.removeprefix(prefix)
            average = names.of_fsdp(name)
            yield _stored(tensors, average if averaged and average in tensors else key, name, stored.shape)
    yield from _whole(others.get(prefix.removesuffix("."), {}))


def _stored(tensors: StoredTensors, key: str, name: str, shape: tuple[int, ...]) -> _Entry:
    if key not in tensors:  # a parameter without elements
        return _Entry(name, shape, torch.float32, lambda: torch.empty(shape))
    return _Entry(name, shape, tensors[key].dtype, lambda: tensors.whole(key).view(shape))


#: What Lightning does not save with ``weights_only=True``. What callbacks have added by hooks cannot be told from what
#: the module has added, and stays.
_TO_RESUME = (
    "callbacks",
    "lr_schedulers",
    "optimizer_states",
    "MixedPrecision",
    "averaging_state",
    _CURRENT,
    names.AVERAGES,
)


def _lightning(stored: _Stored, entries: list[_Entry], dtype: torch.dtype | None, optimizer: bool) -> dict[str, Any]:
    """The content of a Lightning checkpoint."""
    made = {"pytorch-lightning_version": pl.__version__} | stored.rest
    if not optimizer:
        made = {key: value for key, value in made.items() if key not in _TO_RESUME}
    else:
        if "loops" not in made:
            raise ValueError("`zp.export(optimizer=True)`: the checkpoint has no progress of a Trainer to resume.")
        made["optimizer_states"] = stored.optimizers()
        if made.get(_CURRENT) == {}:  # the weights that are trained are among the parts
            made[_CURRENT] = {entry.name: entry.read() for entry in stored.weights(averaged=False)}
        elif stored.has_ema:
            made[names.AVERAGES] = {entry.name: entry.read() for entry in entries}
            entries = list(stored.weights(averaged=False))
    weights = {entry.name: _converted(entry, dtype) for entry in entries}
    return made | {"state_dict": {**weights, **stored.others}}


def _converted(entry: _Entry, dtype: torch.dtype | None) -> Tensor:
    return entry.read().detach().to("cpu", dtype if entry.dtype.is_floating_point else None)


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
