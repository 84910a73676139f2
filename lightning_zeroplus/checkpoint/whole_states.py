"""The optimizer states of a sharded checkpoint as torch's optimizers have them: whole, and numbered."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from lightning_zeroplus.checkpoint.data_only import DataOnlyPlanner, DataOnlyReader, read_metadata
from lightning_zeroplus.checkpoint.everywhere import errors_of_torch
from lightning_zeroplus.checkpoint.names import AVERAGES, by_number
from lightning_zeroplus.checkpoint.places.address import Files
from lightning_zeroplus.checkpoint.sources import OPTIMIZER, FolderSource

_FSDP_OPTIMIZER = "optimizer_"


def of_zero(folder: FolderSource) -> list[dict[str, Any]]:
    """The states of a folder that ``ZeroPlusStrategy`` has saved, one ``state_dict()`` per optimizer.

    Raises:
        ValueError: If the folder has none, or does not say how they are numbered.
    """
    saved = folder.summary((), ())["optimizer"]
    if saved is None:
        raise ValueError(has_none(folder.path))
    if any("shapes" not in group for group in saved["groups"]):
        raise ValueError(
            f"The checkpoint {str(folder.path)!r} was saved by an earlier version, without the order of"
            " the optimizer's parameters. Resume it and save it again, or export it without `optimizer=True`."
        )
    made: list[dict[str, Any]] = []
    owners: dict[str, set[int]] = {}
    for group in saved["groups"]:
        for name in group["shapes"]:
            owners.setdefault(name, set()).add(group["owner"])
    shares = any(len(each) > 1 for each in owners.values())
    for group in saved["groups"]:
        while len(made) <= group["owner"]:
            made.append({"state": {}, "param_groups": []})
        each = made[group["owner"]]
        first = sum(len(other["params"]) for other in each["param_groups"])
        each["param_groups"].append(group["settings"] | {"params": [*range(first, first + len(group["shapes"]))]})
        for number, (name, shape) in enumerate(group["shapes"].items(), first):
            state = saved["states"].get(name, {"elementwise": (), "others": {}})
            owner = group["owner"] if shares else None
            # Copies: parameters that are stepped together share what is not elementwise.
            others = {k: v.clone() if isinstance(v, Tensor) else v for k, v in _of(owner, state["others"]).items()}
            keys = _of(owner, {key: key for key in state["elementwise"]})
            elementwise = {own: _read(folder, f"{OPTIMIZER}{name}/{key}", shape) for own, key in keys.items()}
            if others or elementwise:
                each["state"][number] = others | elementwise
    return made


def _of(owner: int | None, states: dict[str, Any]) -> dict[str, Any]:
    """The states of one optimizer, where several share parameters; None: all."""
    return states if owner is None else by_number(states).get(owner, {})


def scaler_of_zero(folder: FolderSource) -> dict[str, Any]:
    """The loss scale, where Lightning's ``MixedPrecision`` finds it; empty if there is none."""
    scale = folder.summary((), ()).get("loss_scale", {}).get("cur_scale")
    if scale is None:
        return {}
    fresh = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
    return {"MixedPrecision": {"scale": float(scale)} | fresh}


def _read(folder: FolderSource, key: str, shape: list[int]) -> Tensor:
    key = folder.prefix + key
    if key not in folder.tensors:  # a parameter without elements
        return torch.empty(shape)
    return folder.tensors.whole(key).view(shape)


def of_fsdp(path: Files) -> list[dict[str, Any]]:
    """The states of a folder that ``ZeroPlusFSDPStrategy`` has saved, one ``state_dict()`` per optimizer.

    Raises:
        ValueError: If the folder has none.
        RuntimeError: If it is damaged, or contains more than data.
    """
    metadata = read_metadata(path)
    stored = {
        name: each
        for name, each in metadata.state_dict_metadata.items()
        if name.startswith(_FSDP_OPTIMIZER) and AVERAGES not in name
    }
    if not stored:
        raise ValueError(has_none(path))
    flat: dict[str, Any] = {
        name: None if isinstance(each, BytesStorageMetadata) else torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in stored.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        with errors_of_torch(f"The checkpoint {str(path)!r} is damaged"):
            dcp.load(flat, storage_reader=DataOnlyReader(path), planner=DataOnlyPlanner(), no_dist=True)
    nested: dict[Any, Any] = {}
    for name, value in flat.items():
        *places, last = metadata.planner_data[name]
        place = nested
        for each in places:
            place = place.setdefault(each, {})
        place[last] = value
    return [_numbered(nested[f"{_FSDP_OPTIMIZER}{index}"]) for index in range(len(nested))]


def _numbered(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with numbers of parameters in place of their names."""
    groups = [group for _, group in sorted(saved["param_groups"].items())]
    names = [name for group in groups for name in group["params"]]
    states = saved.get("state", {})
    numbers = iter(range(len(names)))
    return {
        "state": {number: states[name] for number, name in enumerate(names) if name in states},
        "param_groups": [group | {"params": [next(numbers) for _ in group["params"]]} for group in groups],
    }


def has_none(path: Files) -> str:
    """The error of a checkpoint without optimizer states."""
    return (
        f"The checkpoint {str(path)!r} has no optimizer states: it was saved with `save_weights_only=True`."
        " Export it without `optimizer=True`."
    )
