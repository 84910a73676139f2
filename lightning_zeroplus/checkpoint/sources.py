"""The kinds of ``ckpt_path``: a folder of ours, a plain Lightning checkpoint, or a safetensors file with weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lightning_zeroplus.checkpoint.data_only import HOW_TO_ALLOW, METADATA, load_data
from lightning_zeroplus.checkpoint.fragments import Fragment, StoredTensor, StoredTensors
from lightning_zeroplus.checkpoint.hooked import Placeholders, Unread
from lightning_zeroplus.checkpoint.names import joint_key, renamed_optimizer, sorted_states
from lightning_zeroplus.checkpoint.numbered import states_by_name
from lightning_zeroplus.checkpoint.places.address import Files
from lightning_zeroplus.checkpoint.places.files import local_copy

TRAINER = "meta.pt"
FORMAT = 1
#: The format of checkpoints whose ``state_dict`` a hook has changed: weights may be missing or among the extra entries.
HOOKED = 2
#: The format of checkpoints without frozen weights, of which they have fingerprints.
WITHOUT_FROZEN = 3
#: The format of checkpoints of Fabric: several models, and whatever else the user has named.
FABRIC = 4
WEIGHTS = "weights/"
OPTIMIZER = "optimizer/"
#: Where the ``meta.pt`` of ``zeroplus_fsdp`` has what is neither a parameter nor a buffer, by name of a ``state_dict``.
OTHERS = "zeroplus_others"


class Reader(Protocol):
    """Sharded or whole tensors in files.

    Attributes:
        path: Their folder or file.
    """

    path: Files

    def read(self, fragments: Iterable[Fragment]) -> None:
        """Fill flat fragments of ``weights/NAME`` and ``optimizer/NAME/KEY``."""


class Source(Reader, Protocol):
    """A checkpoint that has been opened.

    Attributes:
        rest: What the Trainer and its callbacks restore.
        frozen: Fingerprints of the weights that it has left out, by name: see :mod:`.saving.frozen`.
    """

    rest: dict[str, Any]
    frozen: Mapping[str, Any]

    def shapes(self) -> dict[str, Sequence[int]]:
        """Shapes by name; a tied parameter under each of its names."""

    def extra(self, parameters: Iterable[str]) -> dict[str, Any]:
        """The entries of the checkpoint's ``state_dict`` that are not ``parameters``."""

    def summary(self, groups: Sequence[Sequence[str]], trained: Collection[str]) -> dict[str, Any]:
        """The engine's ``summary()``. Its ``optimizer`` is None if there is no optimizer state.

        Args:
            groups: The names of the parameters in the optimizer's groups, in order.
            trained: The names of the parameters that it updates; a group may have frozen ones.
        """


_WRAPPED = "__bnb_optimizer_quant_state__"


def open_checkpoint(path: Files, weights_only: bool = True) -> Source:
    """Open a checkpoint of any kind, without reading what is sharded or memory-mapped.

    Args:
        path: A folder or a file, as :meth:`.places.place.Place.readable` gives it.
        weights_only: Refuse files with more than data.

    Raises:
        FileNotFoundError: If ``path`` does not exist.
        RuntimeError: If it is damaged, not complete, not a checkpoint, or contains more than data; with the file and
            the cause.
    """
    return FolderSource(path, weights_only) if path.is_dir() else open_file(path, weights_only)


def open_file(path: Files, weights_only: bool = True) -> FileSource:
    """Open a file, which holds whole tensors; see :func:`open_checkpoint`."""
    return FileSource(path, weights_only)


def load_file_of(path: Files, weights_only: bool = True) -> Any:
    """What ``torch.save`` or safetensors have written to a file; its tensors stay there until they are used.

    Raises:
        FileNotFoundError: If ``path`` does not exist.
        RuntimeError: If it is damaged, or contains more than data.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint {str(path)!r}.")
    if not path.stat().st_size:
        raise RuntimeError(f"The checkpoint {str(path)!r} is empty.")
    if path.suffix != ".safetensors":
        return load_data(path, weights_only, mmap=True)
    try:
        with local_copy(path) as local:
            return load_file(local)
    except (SafetensorError, ValueError) as error:
        raise RuntimeError(f"{str(path)!r} is damaged, or not a safetensors file: {error}") from error


def open_folder(path: Files, weights_only: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what is not sharded of a folder: the user's or the Trainer's state, and ours.

    Raises:
        RuntimeError: If it is not one of ours, with the remedy, or is damaged.
    """
    if not (path / METADATA).exists() and not (path / TRAINER).exists():
        found = (file for pattern in ("*/*_states.pt", "*_states.pt") for file in path.glob(pattern))
        files = sorted(found, key=str)
        if files or (path / "latest").exists():
            raise RuntimeError(_of_deepspeed(path, files))
        raise RuntimeError(f"The folder {str(path)!r} is not a checkpoint: it has neither {METADATA} nor {TRAINER}.")
    rest = load_data(path / TRAINER, weights_only)
    ours = rest.pop("zeroplus", None) if isinstance(rest, dict) else None
    if ours is None:
        raise RuntimeError(
            f"The checkpoint {str(path)!r} was not saved by `ZeroPlusStrategy`. Write it to a file with"
            " `lightning_zeroplus.export(..., 'model.ckpt', optimizer=True)`, and pass that file."
        )
    if ours["format"] not in (FORMAT, HOOKED, WITHOUT_FROZEN, FABRIC):
        raise RuntimeError(
            f"The checkpoint {str(path)!r} has format {ours['format']}, and this version of lightning-zeroplus"
            f" reads formats up to {FABRIC}. Install a newer one."
        )
    return rest, ours


def _of_deepspeed(path: Files, files: Sequence[Files]) -> str:
    remedy = (
        "convert it with DeepSpeed's `zero_to_fp32.py`, with `--safe_serialization`, and start from the safetensors"
        " file that it writes (under Fabric with `fabric.load_raw`)."
    )
    if files and not any(file.name.endswith("_optim_states.pt") for file in files):  # of stage 0
        remedy = (
            f"write its weights, `torch.load({str(files[0])!r}, weights_only=False)['module']`, to a safetensors file,"
            " and start from that (under Fabric with `fabric.load_raw`)."
        )
    return (
        f"The checkpoint {str(path)!r} was written by DeepSpeed, in files that may execute code when they are read. If"
        f" you trust its source, {remedy}"
    )


class FolderSource:
    """A folder that ``ZeroPlusStrategy`` has saved.

    Attributes:
        prefix: What the names of its sharded tensors begin with.
    """

    prefix = ""

    def __init__(self, path: Files, weights_only: bool = True) -> None:
        rest, ours = open_folder(path, weights_only)
        if ours["format"] == FABRIC:
            raise RuntimeError(
                f"The checkpoint {str(path)!r} was saved by `fabric.save`, without the Trainer's state. Write its"
                " weights to a file with `lightning_zeroplus.export`, and pass that file."
            )
        self.path, self.rest = path, rest
        self.frozen: Mapping[str, Any] = ours.get("frozen", {})
        self.has_averaged_weights = "state_dict" in rest
        self._summary: dict[str, Any] = ours["engine"]
        self._extra: dict[str, Any] = ours["extra"]
        self.tensors = StoredTensors(path)

    def tied(self) -> dict[str, str]:
        """The stored name of each tied parameter, by its other names."""
        tied: dict[str, str] = self._summary["tied"]
        return tied

    def shapes(self) -> dict[str, Sequence[int]]:
        own: dict[str, Sequence[int]] = self._summary["shapes"]
        return own | {name: own[first] for name, first in self.tied().items()}

    def placeholders(self) -> Placeholders:
        """A ``state_dict`` for hooks; see :class:`HookedSource`."""
        own = {name: torch.float32 if (stored := self.weight(name)) is None else stored.dtype for name in self.shapes()}
        weights = {
            name: Unread.of(tuple(shape), own[name], partial(self.whole, name, tuple(shape), own[name]))
            for name, shape in self.shapes().items()
        }
        return Placeholders(weights, self._extra)

    def weight(self, name: str) -> StoredTensor | None:
        """Where a weight is stored, under its first name; None: it has no elements."""
        return self.tensors.get(self.prefix + WEIGHTS + self.tied().get(name, name))

    def whole(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Read one weight; on this rank alone."""
        value = torch.empty(shape, dtype=dtype)
        self.read([Fragment(WEIGHTS + name, (0,), (value.numel(),), value.view(-1))])
        return value

    def extra(self, parameters: Iterable[str]) -> dict[str, Any]:
        return self._extra

    def summary(self, groups: Sequence[Sequence[str]], trained: Collection[str]) -> dict[str, Any]:
        return self._summary | {"optimizer": self._summary.get("optimizer")}

    def read(self, fragments: Iterable[Fragment]) -> None:
        fragments = list(fragments)
        # A tied parameter is stored under its first name, which may not be its first name in this model.
        stored = {WEIGHTS + name: WEIGHTS + first for name, first in self.tied().items()}
        wanted = [fragment._replace(key=self.prefix + stored.get(fragment.key, fragment.key)) for fragment in fragments]
        self.tensors.read([fragment for fragment in wanted if fragment.key in self.tensors])
        _fill(fragments, self._extra)


class HookedSource:
    """A folder whose ``state_dict`` was changed by ``on_load_checkpoint``.

    Args:
        folder: The folder.
        placeholders: The ``state_dict`` that the hook got.
        state: The ``state_dict`` that it left.
        saved: Names that the module saves parameters by, by its own, where they differ; for entries that it replaced.
    """

    def __init__(
        self, folder: FolderSource, placeholders: Placeholders, state: Mapping[str, Any], saved: Mapping[str, str]
    ) -> None:
        self.path, self.rest, self.frozen = folder.path, folder.rest, folder.frozen
        self._folder = folder
        groups = (folder.summary((), ())["optimizer"] or {}).get("groups", ())
        there = {*folder.shapes(), *(name for group in groups for name in group["names"])}
        known = {name: stored for name, stored in saved.items() if stored in there}
        self._names = known | placeholders.earlier_names(state)
        unread = [name for name, value in state.items() if isinstance(value, Unread) and value.whole is None]
        self._stored = {name: self._names.get(name, name) for name in unread}
        self._state = {
            name: value.whole if isinstance(value, Unread) and value.whole is not None else value
            for name, value in state.items()
        }

    def shapes(self) -> dict[str, Sequence[int]]:
        return {name: tuple(value.shape) for name, value in self._state.items() if isinstance(value, Tensor)}

    def extra(self, parameters: Iterable[str]) -> dict[str, Any]:
        known = set(parameters)
        extra = {name: value for name, value in self._state.items() if name not in known}
        return {name: self._whole(name) if name in self._stored else value for name, value in extra.items()}

    def _whole(self, name: str) -> Tensor:
        unread = self._state[name]
        return self._folder.whole(self._stored[name], tuple(unread.shape), unread.dtype)

    def summary(self, groups: Sequence[Sequence[str]], trained: Collection[str]) -> dict[str, Any]:
        summary = self._folder.summary(groups, trained)
        names = {stored: name for name, stored in self._names.items()}
        optimizer = summary["optimizer"]
        return summary if optimizer is None else summary | {"optimizer": renamed_optimizer(optimizer, names)}

    def read(self, fragments: Iterable[Fragment]) -> None:
        fragments = list(fragments)
        there = {WEIGHTS + name for name in self._stored}
        wanted = [each for each in fragments if each.key in there or not each.key.startswith(WEIGHTS)]
        self._folder.read([renamed(each, self._names) for each in wanted])
        _fill(fragments, {name: value for name, value in self._state.items() if name not in self._stored})


def renamed(fragment: Fragment, names: Mapping[str, str]) -> Fragment:
    """A fragment of ``weights/NAME`` or ``optimizer/NAME/STATE`` under another name of the parameter."""
    kind, _, rest = fragment.key.partition("/")
    name, *state = [rest] if kind == WEIGHTS[:-1] else rest.rsplit("/", 1)
    return fragment._replace(key="/".join([kind, names.get(name, name), *state]))


def _fill(fragments: Iterable[Fragment], weights: Mapping[str, Any]) -> None:
    """Copy each whole tensor into the fragments of the weight with its name."""
    for fragment in fragments:
        name = fragment.key.removeprefix(WEIGHTS)
        value = weights.get(name)
        if name != fragment.key and isinstance(value, Tensor):
            (start,) = fragment.offsets
            fragment.data.copy_(value.detach().flatten().narrow(0, start, fragment.data.numel()))


class FileSource:
    """A file with whole tensors: what ``Trainer.save_checkpoint`` writes without sharding, or safetensors."""

    frozen: Mapping[str, Any] = {}

    def __init__(self, path: Files, weights_only: bool = True) -> None:
        self.path = path
        rest = load_file_of(path, weights_only)
        if path.suffix == ".safetensors":
            # Nothing but weights: the Trainer starts at step 0.
            rest = {"pytorch-lightning_version": pl.__version__, "state_dict": rest, "lr_schedulers": []}
        if not isinstance(rest, dict) or not isinstance(rest.get("state_dict"), Mapping):
            raise RuntimeError(f"{str(path)!r} is not a Lightning checkpoint: it has no 'state_dict'. {HOW_TO_ALLOW}")
        self.rest: dict[str, Any] = rest

    @property
    def weights(self) -> dict[str, Any]:
        """The state dict, including the changes of the LightningModule's ``on_load_checkpoint``."""
        return self.rest["state_dict"]

    def shapes(self) -> dict[str, Sequence[int]]:
        return {name: tuple(value.shape) for name, value in self.weights.items() if isinstance(value, Tensor)}

    def extra(self, parameters: Iterable[str]) -> dict[str, Any]:
        known = set(parameters)
        return {name: value for name, value in self.weights.items() if name not in known}

    def summary(self, groups: Sequence[Sequence[str]], trained: Collection[str]) -> dict[str, Any]:
        saved = self.rest.get("optimizer_states")
        self._states: dict[str, dict[str, Any]] = {}
        if not saved:
            return {"optimizer": None}
        names = [name for group in groups for name in group]
        everything = _joined(saved, shares=len(set(names)) < len(names))
        self._states = states_by_name(str(self.path), everything, groups)
        return {
            "optimizer": {
                "class": None,
                "groups": [
                    {
                        "names": sorted(set(names) & ({*trained} | self._states.keys())),
                        "settings": {k: v for k, v in group.items() if k != "params"},
                    }
                    for group, names in zip(everything["param_groups"], groups, strict=True)
                ],
                "states": {
                    name: sorted_states(state, getattr(self.weights.get(name), "shape", None))
                    for name, state in self._states.items()
                },
            },
            "counters": {"global_steps": self.rest.get("global_step", 0)},
        }

    def read(self, fragments: Iterable[Fragment]) -> None:
        for fragment in fragments:
            name = fragment.key.removeprefix(WEIGHTS)
            if name != fragment.key:
                value = self.weights.get(name)
            else:
                name, _, key = fragment.key.removeprefix(OPTIMIZER).rpartition("/")
                value = self._states.get(name, {}).get(key)
            if isinstance(value, Tensor):
                (start,) = fragment.offsets
                fragment.data.copy_(value.detach().flatten().narrow(0, start, fragment.data.numel()))


def _joined(saved: Sequence[Mapping[str, Any]], shares: bool) -> dict[str, Any]:
    """The state dicts of several optimizers as one, with consecutive numbers of parameters; each counts from 0.

    Args:
        saved: The state dicts.
        shares: Whether several have states of the same parameters, whose keys must then differ.
    """
    joined: dict[str, Any] = {"state": {}, "param_groups": []}
    first = 0
    for owner, each in enumerate(saved):
        for number, found in each["state"].items():
            state = _unwrapped(found)
            own = {joint_key(owner, key): value for key, value in state.items()} if shares else state
            joined["state"][first + number] = own
        for group in each["param_groups"]:
            joined["param_groups"].append({**group, "params": [first + number for number in group["params"]]})
        first += sum(len(group["params"]) for group in each["param_groups"])
    return joined


def _unwrapped(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The states of a parameter, without the mapping in which bitsandbytes' ``state_dict()`` wraps them."""
    return {key: value for key, value in state.items() if key != _WRAPPED} | dict(state.get(_WRAPPED, {}))
