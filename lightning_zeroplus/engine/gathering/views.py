"""Stage 3: views of a weight that a graph keeps follow the weight, as under DDP."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from deepspeed.utils import z3_leaf_module
from torch import nn

from lightning_zeroplus.engine.gathering.after_writes import GathersAfterWrites
from lightning_zeroplus.engine.gathering.resident import own_parameters
from lightning_zeroplus.weights.holders import holders
from lightning_zeroplus.weights.partitioned import views
from lightning_zeroplus.weights.partitioned.access import is_in_partition, memory_of


class ViewsFollow(GathersAfterWrites):
    """Mixin for upstream's ``PartitionedParameterCoordinator``.

    If a graph has views of a weight at the end of the weight's module, as for ``x @ weight.t()``, then the weight moves
    to their memory in the next forward, and when a user's code gets it. So all graphs share one memory, too.
    """

    def fetch_sub_module(self, current_submodule: Any, forward: bool) -> None:
        super().fetch_sub_module(current_submodule, forward)  # type: ignore[misc]
        if forward:
            for param in _read(current_submodule):
                memory = None if getattr(param, "_zeroplus_given", True) else views.memory(param)
                if memory is not None:
                    memory_of(param, memory)

    def release_sub_module(self, submodule: nn.Module, forward: bool = False) -> None:
        if forward:
            for param in _read(submodule):
                if _is_viewed(param):
                    views.note(param)
        super().release_sub_module(submodule, forward)  # type: ignore[misc]


def _read(module: nn.Module) -> Iterable[Any]:
    """The weights that are gathered for a module, with those of others that it is known to read."""
    own = module.parameters() if z3_leaf_module(module) else own_parameters(module)
    return chain(own, vars(module).get("_external_params", {}).values())


def _is_viewed(param: Any) -> bool:
    if getattr(param, "_zeroplus_given", True) or param.ds_status.name != "AVAILABLE":
        return False
    return holders(param) > 1 and not is_in_partition(param)
