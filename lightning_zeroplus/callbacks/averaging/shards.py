"""This rank's shards of a module's weights, to read and to write: of an engine, of FSDP2, or whole weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_zeroplus.checkpoint.fragments import Fragment, StoredTensors
from lightning_zeroplus.checkpoint.hooked import saved_names
from lightning_zeroplus.checkpoint.names import of_zero
from lightning_zeroplus.checkpoint.places.address import Files
from lightning_zeroplus.fsdp.state.checkpoint import name_by_torch, read_averages

if TYPE_CHECKING:
    from lightning_zeroplus.engine.engine import ZeroPlusEngine

#: By a parameter's name and the index of the first element.
Values = dict[tuple[str, int], Tensor]


class Shard(NamedTuple):
    """Consecutive elements of a parameter, which this rank keeps.

    Attributes:
        name: The parameter's name.
        start: The first element; 0 for a shard of FSDP2, whose elements may not be consecutive.
        data: The elements, one-dimensional; the fp32 master weights if there are any.
    """

    name: str
    start: int
    data: Tensor


class Shards(Protocol):
    """The shards of all parameters on this rank."""

    def read(self) -> Iterator[Shard]:
        """The current weights."""

    def write(self, values: Values) -> None:
        """Replace the weights; a collective."""

    def of_whole(self, name: str, start: int, whole: Tensor) -> Tensor:
        """The elements of a whole parameter that a shard has, one-dimensional."""

    def load(self, folder: Files, values: Values) -> None:
        """Read averages that were saved in a folder, at any world size, into ``values``; a collective."""

    def follow(self, values: Values) -> Values:
        """``values`` by the shards that there are now, which may have changed; a collective if they have."""

    def saved_name(self, name: str) -> str:
        """The name of a parameter in checkpoints."""


class WholeShards:
    """Every rank has whole parameters: DDP, a single device.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._saved_names = saved_names(module)
        first: dict[nn.Parameter, str] = {}
        named = module.named_parameters(remove_duplicate=False)
        self._layouts = {self.saved_name(name): _layout(first.setdefault(param, name), param) for name, param in named}

    def read(self) -> Iterator[Shard]:
        for name, param in self.module.named_parameters():
            yield Shard(name, 0, param.detach().reshape(-1))

    def write(self, values: Values) -> None:
        for name, param in self.module.named_parameters():
            if (name, 0) in values:
                param.data.copy_(values[name, 0].view(param.shape))

    def of_whole(self, name: str, start: int, whole: Tensor) -> Tensor:
        return whole.reshape(-1)

    def load(self, folder: Files, values: Values) -> None:
        raise ValueError(f"The checkpoint {str(folder)!r} is a folder of another strategy.")

    def follow(self, values: Values) -> Values:
        return values

    def saved_name(self, name: str) -> str:
        return self._saved_names.get(name, name)

    def whole(self, values: Values) -> dict[str, Tensor]:
        """Whole averages in host memory, by each saved name of a tied parameter; a collective."""
        tensors = self.as_tensors(values).items()
        return {name: (t.full_tensor() if isinstance(t, DTensor) else t).to("cpu", copy=True) for name, t in tensors}

    def as_tensors(self, values: Values) -> dict[str, Tensor]:
        """The values in the form of the parameters, by saved names, in the memory of ``values``; also after the fit."""
        return {
            name: layout.of(values[layout.first, 0])
            for name, layout in self._layouts.items()
            if (layout.first, 0) in values
        }


class ShardsOfFSDP(WholeShards):
    """Shards of DTensors. Parameters that are none are whole."""

    def saved_name(self, name: str) -> str:
        return name_by_torch(super().saved_name(name))

    def read(self) -> Iterator[Shard]:
        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # it may still be unsharded from its forward
        for name, param in self.module.named_parameters():
            yield Shard(name, 0, _local(param).reshape(-1))

    def write(self, values: Values) -> None:
        for name, start, data in self.read():
            if (name, start) in values:
                data.copy_(values[name, start])

    def of_whole(self, name: str, start: int, whole: Tensor) -> Tensor:
        param: Any = self.module.get_parameter(name)
        if not isinstance(param, DTensor):
            return whole.reshape(-1)
        whole = whole.view(param.shape).to(param.device)
        mine = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
        return mine.to_local().reshape(-1)

    def load(self, folder: Files, values: Values) -> None:
        read_averages(folder, self.as_tensors(values))


def _local(param: Any) -> Tensor:
    local: Tensor = param.to_local() if isinstance(param, DTensor) else param
    return local.detach()


class _Layout(NamedTuple):
    """How a parameter is sharded, without the parameter.

    Attributes:
        first: The first of its names.
        shape: The shape of this rank's part.
        spec: Mesh, placements, shape and stride of a DTensor; None: it is whole.
    """

    first: str
    shape: torch.Size
    spec: tuple[Any, ...] | None

    def of(self, value: Tensor) -> Tensor:
        """A tensor of that form, in the memory of ``value``."""
        local = value.view(self.shape)
        if self.spec is None:
            return local
        mesh, placements, shape, stride = self.spec
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _layout(first: str, param: Any) -> _Layout:
    is_sharded = isinstance(param, DTensor)
    spec = (param.device_mesh, param.placements, param.shape, param.stride()) if is_sharded else None
    return _Layout(first, _local(param).shape, spec)


class ShardsOfEngine:
    """Shards of an engine, of any stage.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: ZeroPlusEngine) -> None:
        self.engine = engine
        self._partitions = engine.gradient_accumulation
        self._saved_names: Mapping[str, str] = self._state().saved_names

    def _state(self) -> Any:
        from lightning_zeroplus.engine.state.parts import EngineState

        return EngineState(self.engine)

    def read(self) -> Iterator[Shard]:
        for part in self._state().own_parts(with_optimizer=False):
            yield Shard(part.name, part.start, part.data)

    def write(self, values: Values) -> None:
        from lightning_zeroplus.engine.state.parts import Staged

        state = self._state()
        weights = []
        for slot in state.slots:
            weights.append(slot.tensor.detach().flatten().clone())
            for name, start, numel, offset in slot.pieces:
                if (name, start) in values:
                    weights[-1].narrow(0, offset, numel).copy_(values[name, start])
        state.load(Staged(state.slots, weights, [{} for _ in weights]), {}, {})

    def of_whole(self, name: str, start: int, whole: Tensor) -> Tensor:
        return whole.reshape(-1)[start:]

    def saved_name(self, name: str) -> str:
        return self._saved_names.get(name, name)

    def load(self, folder: Files, values: Values) -> None:
        tensors = StoredTensors(folder)
        keys = {name: of_zero(self.saved_name(name)) for name, _ in values}
        wanted = {
            (name, start): Fragment(keys[name], (start,), tensors[keys[name]].shape, value.cpu())
            for (name, start), value in values.items()
            if keys[name] in tensors
        }
        tensors.read(wanted.values())
        for place, fragment in wanted.items():
            values[place].copy_(fragment.data)

    def follow(self, values: Values) -> Values:
        if self._partitions is self.engine.gradient_accumulation:
            return values
        from lightning_zeroplus.engine.state.parts import Part, assemble

        # Rebuilt, for other groups: partitions begin elsewhere.
        self._partitions = self.engine.gradient_accumulation
        shapes = self._state().shapes
        held: dict[str, list[Part]] = {}
        for (name, start), value in values.items():
            held.setdefault(name, []).append(Part(name, None, start, value))
        here: dict[str, list[Shard]] = {}
        for shard in self.read():
            here.setdefault(shard.name, []).append(shard)
        found: Values = {}
        for name, shape in shapes.items():
            device = next(iter(values.values())).device if values else torch.device("cpu")
            whole = assemble(held.get(name, []), shape, device).flatten()
            for shard in here.get(name, []):
                found[name, shard.start] = whole.narrow(0, shard.start, shard.data.numel()).clone()
        return found


def slices(values: Mapping[str, Tensor], shards: Shards, into: Values) -> None:
    """Copy whole averages into the shards that this rank keeps."""
    for (name, start), value in into.items():
        whole = values.get(shards.saved_name(name))
        if whole is not None:
            value.copy_(shards.of_whole(name, start, whole)[: value.numel()])
