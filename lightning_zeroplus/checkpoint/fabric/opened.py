"""What ``fabric.load`` reads: a folder of Fabric's or of the Trainer's, or a file of another strategy.

A folder of Fabric's holds each model and its optimizers in sharded tensors, whose names begin with the model's number.
Whatever else the user has named is in ``meta.pt``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_zeroplus.checkpoint import whole_states
from lightning_zeroplus.checkpoint.fabric.sources import ModelSource, SavedOptimizer, WholeSource
from lightning_zeroplus.checkpoint.fragments import StoredTensors
from lightning_zeroplus.checkpoint.places.address import Files
from lightning_zeroplus.checkpoint.saving.frozen import cannot_export
from lightning_zeroplus.checkpoint.sources import FABRIC, Source, load_file_of, open_folder

#: The names under which a checkpoint of the Trainer's has its model and its optimizers.
_OF_TRAINER = "state_dict"
_STATES = "optimizer_states"


def prefix_of(number: int) -> str:
    """What the names of the sharded tensors of a model begin with, by its number in the checkpoint."""
    return f"{number}/"


class FabricCheckpoint:
    """A checkpoint that ``fabric.load`` has opened.

    Args:
        path: A folder or a file, as :meth:`.places.place.Place.readable` gives it.
        weights_only: Refuse files with more than data.

    Attributes:
        path: The folder or file.
        rest: What is not sharded, by the user's names.
        models: The sharded models, by the user's names.

    Raises:
        FileNotFoundError: If there is none.
        RuntimeError: If it is damaged, or not a checkpoint, or contains more than data; with the file and the cause.
    """

    def __init__(self, path: Files, weights_only: bool = True) -> None:
        self.path = path
        self.models: dict[str, ModelSource] = {}
        self._states: ModelSource | None = None
        self._optimizers: dict[str, tuple[ModelSource, Mapping[str, Any]]] = {}
        if not path.is_dir():
            self.rest = load_file_of(path, weights_only)
            if not isinstance(self.rest, dict):
                raise RuntimeError(f"{str(path)!r} is not a checkpoint: it has {type(self.rest).__name__}, not a dict.")
            return
        self.rest, ours = open_folder(path, weights_only)
        if ours.get("frozen"):
            raise RuntimeError(cannot_export(path, ours["frozen"]))
        tensors = StoredTensors(path)
        if ours["format"] != FABRIC:
            if _OF_TRAINER not in self.rest:  # a callback's average
                self.models[_OF_TRAINER] = ModelSource(path, ours, tensors, "")
            if ours["engine"].get("optimizer") is not None:
                self._states = ModelSource(path, ours, tensors, "")
            return
        for number, saved in enumerate(ours["models"]):
            source = ModelSource(path, saved, tensors, prefix_of(number))
            self.models |= dict.fromkeys(saved["names"], source)
            self._optimizers |= {name: (source, optimizer) for name, optimizer in saved["optimizers"].items()}

    @property
    def names(self) -> list[str]:
        """What the user has named."""
        return [*self.rest, *self.models, *self._optimizers, *([] if self._states is None else [_STATES])]

    def model(self, name: str) -> Source:
        """The weights of a model.

        Raises:
            RuntimeError: If there is something else under the name.
        """
        found = self.models.get(name)
        if found is not None:
            return found
        value = self.rest.get(name)
        if not isinstance(value, Mapping):
            raise RuntimeError(f"The checkpoint {str(self.path)!r} has no model {name!r}. It has {_list(self.names)}.")
        return WholeSource(self.path, value)

    def optimizer(
        self,
        name: str,
        groups: Sequence[Sequence[str]],
        trained: Collection[str],
        shapes: Mapping[str, Sequence[int]],
    ) -> SavedOptimizer:
        """An optimizer.

        Args:
            name: The user's name for it.
            groups: The names of the parameters in its groups, in order.
            trained: The names of the parameters that it updates.
            shapes: Shapes of the parameters, by name.

        Raises:
            RuntimeError: If there is something else under the name.
        """
        if name in self._optimizers:
            source, mine = self._optimizers[name]
            summary = source.summary((), ())
            saved = [group for group in summary["optimizer"]["groups"] if group["owner"] == mine["number"]]
            members = {each for group in saved for each in group["names"]}
            states = {each: state for each, state in summary["optimizer"]["states"].items() if each in members}
            return SavedOptimizer(source, {"class": mine["class"], "groups": saved, "states": states}, summary)
        value = self.rest.get(name)
        if not isinstance(value, Mapping) or "param_groups" not in value or "state" not in value:
            raise RuntimeError(
                f"The checkpoint {str(self.path)!r} has no optimizer {name!r}. It has {_list(self.names)}."
            )
        # Whether a state has an element for each of a weight is seen from the shapes.
        like = {each: torch.empty(tuple(shape), device="meta") for each, shape in shapes.items()}
        whole = WholeSource(self.path, like, [value])
        return SavedOptimizer(whole, whole.summary(groups, trained)["optimizer"], {})

    def value(self, name: str) -> Any:
        """What has been saved under a name, whole, in host memory."""
        if name in self.models:
            return self.models[name].state_dict()
        if name in self._optimizers:
            source, mine = self._optimizers[name]
            return whole_states.of_zero(source)[mine["number"]]
        if name == _STATES and self._states is not None:
            return whole_states.of_zero(self._states)
        return _in_memory(self.rest[name])

    def others(self, names: Collection[str]) -> dict[str, Any]:
        """What is not sharded, besides ``names``."""
        return {name: _in_memory(value) for name, value in self.rest.items() if name not in names}


def _in_memory(value: Any) -> Any:
    """A copy: tensors of a file are still in the file, which the user may write again."""
    return tree_map_only(Tensor, torch.clone, value)


def load_raw(path: Files, weights_only: bool = True) -> dict[str, Any]:
    """A file with one ``state_dict``, as ``torch.save(model.state_dict())`` or safetensors write it.

    Raises:
        FileNotFoundError: If there is none.
        RuntimeError: If it is damaged, contains more than data, or is a folder.
    """
    if path.is_dir():
        raise RuntimeError(
            f"`fabric.load_raw({str(path)!r})`: this is a folder, and not a file with one state dict. Load a checkpoint"
            " with `fabric.load(path, {'model': model})`, with the name under which the model was saved."
        )
    found = load_file_of(path, weights_only)
    if not isinstance(found, Mapping):
        raise RuntimeError(f"{str(path)!r} has no state dict, but {type(found).__name__}.")
    return dict(found)


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
