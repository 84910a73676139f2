"""The models and optimizers of a checkpoint of Fabric's, sharded or whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zeroplus.checkpoint.fragments import Fragment, StoredTensors
from lightning_zeroplus.checkpoint.names import renamed_optimizer
from lightning_zeroplus.checkpoint.places.address import Files
from lightning_zeroplus.checkpoint.sources import OPTIMIZER, FileSource, FolderSource, Reader, Source, renamed


class ModelSource(FolderSource):
    """One of the models in a folder.

    Args:
        path: The folder.
        saved: The model's entry: ``engine``, ``extra``, and the ``order`` of its ``state_dict``.
        tensors: The folder's sharded tensors.
        prefix: What their names begin with.
    """

    def __init__(self, path: Files, saved: Mapping[str, Any], tensors: StoredTensors, prefix: str) -> None:
        self.path, self.rest, self.tensors, self.prefix = path, {}, tensors, prefix
        self.frozen = {}
        self.has_averaged_weights = False
        self._summary = saved["engine"]
        self._extra = saved["extra"]
        self._order: Sequence[str] = saved.get("order", ())

    def state_dict(self) -> dict[str, Any]:
        """The model's ``state_dict``, whole, in host memory."""
        everything = {name: self._read_whole(name, shape) for name, shape in self.shapes().items()} | self._extra
        return {name: everything.pop(name) for name in self._order if name in everything} | everything

    def _read_whole(self, name: str, shape: Sequence[int]) -> Tensor:
        stored = self.weight(name)
        return torch.empty(tuple(shape)) if stored is None else self.whole(name, tuple(shape), stored.dtype)


class WholeSource(FileSource):
    """Whole tensors of a model, and the states of its optimizers.

    Args:
        path: The file.
        weights: The model's ``state_dict``.
        optimizers: The optimizers' ``state_dict``.
    """

    def __init__(self, path: Files, weights: Mapping[str, Any], optimizers: Sequence[Any] = ()) -> None:
        self.path = path
        self.rest = {"state_dict": dict(weights), "optimizer_states": list(optimizers)}


class RenamedSource:
    """A source that has other names for some of the model's parameters.

    Args:
        source: The source.
        names: Its names, by the model's, where they differ.
    """

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        self.path, self.rest, self.frozen = source.path, source.rest, source.frozen
        self._source, self._names = source, names
        self._own = {saved: name for name, saved in names.items()}

    def shapes(self) -> dict[str, Sequence[int]]:
        return {self._own.get(name, name): shape for name, shape in self._source.shapes().items()}

    def extra(self, parameters: Iterable[str]) -> dict[str, Any]:
        return self._source.extra([self._names.get(name, name) for name in parameters])

    def summary(self, groups: Sequence[Sequence[str]], trained: Collection[str]) -> dict[str, Any]:
        stored = [[self._names.get(name, name) for name in group] for group in groups]
        summary = self._source.summary(stored, {self._names.get(name, name) for name in trained})
        optimizer = summary["optimizer"]
        return summary if optimizer is None else summary | {"optimizer": renamed_optimizer(optimizer, self._own)}

    def read(self, fragments: Iterable[Fragment]) -> None:
        self._source.read([renamed(fragment, self._names) for fragment in fragments])


class SavedOptimizer(NamedTuple):
    """An optimizer in a checkpoint.

    Attributes:
        source: Where its states are.
        summary: ``class``, ``groups`` and ``states``, as in the engine's ``summary()``.
        more: What else the engine's ``summary()`` has.
    """

    source: Reader
    summary: dict[str, Any]
    more: dict[str, Any]

    def renamed(self, names: Mapping[str, str]) -> SavedOptimizer:
        """The optimizer with the names of a model's parameters; ``names`` are those in a folder, by the model's."""
        if not names or not isinstance(self.source, FolderSource):  # others number parameters
            return self
        own = {saved: name for name, saved in names.items()}
        return self._replace(source=RenamedSource(self.source, names), summary=renamed_optimizer(self.summary, own))


class JoinedOptimizers:
    """The optimizers of one engine, each of which may come from elsewhere in the checkpoint.

    Args:
        path: The checkpoint.
        parts: The optimizers, in the engine's order.
        owners: For each parameter group of the engine, the number of its optimizer.
    """

    def __init__(self, path: Files, parts: Sequence[SavedOptimizer], owners: Sequence[int]) -> None:
        self.path = path
        self._sources = {name: part.source for part in parts for name in part.summary["states"]}
        classes = [part.summary["class"] for part in parts]
        self.summary: dict[str, Any] = dict(parts[0].more)
        self.summary["optimizer"] = {
            "class": None if None in classes else " + ".join(classes),
            "groups": _in_order([part.summary["groups"] for part in parts], owners),
            "states": {name: state for part in parts for name, state in part.summary["states"].items()},
        }

    def read(self, fragments: Iterable[Fragment]) -> None:
        """Fill flat fragments of ``optimizer/NAME/KEY``."""
        by_source: dict[int, tuple[Reader, list[Fragment]]] = {}
        for fragment in fragments:
            name, _, _ = fragment.key.removeprefix(OPTIMIZER).rpartition("/")
            source = self._sources[name]
            by_source.setdefault(id(source), (source, []))[1].append(fragment)
        for source, mine in by_source.values():
            source.read(mine)


def _in_order(groups: Sequence[Sequence[Any]], owners: Sequence[int]) -> list[Any]:
    """The groups of all optimizers in the engine's order: a group may have been added to the first one last."""
    if [len(each) for each in groups] != [owners.count(number) for number in range(len(groups))]:
        return [group for each in groups for group in each]  # they do not fit, and `check_optimizer` will say so
    remaining = [iter(each) for each in groups]
    return [next(remaining[owner]) for owner in owners]
