"""Parameters outside of every single unit: a LightningModule's own, and parameters that several of its children share.

FSDP2 gathers the parameters of a unit for the forward of a module. These parameters get units of modules that are never
called. Each unit is gathered where a parameter is used: see
:class:`~lightning_zeroplus.fsdp.whole.tensor.WholeDTensor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_zeroplus.fsdp.late_grads import parameters


class Beside(nn.Module):
    """A module for parameters of one dtype that other modules have, too.

    Args:
        params: The parameters.
        places: For each parameter, the modules that have it, each with the parameter's name there.
    """

    def __init__(self, params: Sequence[nn.Parameter], places: Sequence[list[tuple[nn.Module, str]]]) -> None:
        super().__init__()
        for number, param in enumerate(params):
            self.register_parameter(str(number), param)
        self._places = places

    def share(self) -> None:
        """Tell FSDP2 which other modules have the parameters. Call it after ``fully_shard`` of this module."""
        assert isinstance(self, FSDPModule)
        for record in parameters(self):
            info = record._module_info
            places = self._places[int(info.param_name)]
            info.shared_modules += [module for module, _ in places]
            info.shared_param_names += [name for _, name in places]
            record._setattr_on_modules(record.sharded_param)


def find_beside(module: nn.Module, roots: Sequence[nn.Module]) -> list[Beside]:
    """The parameters of ``module`` that are in none of ``roots``, or in several; one unit for each dtype.

    Raises:
        ValueError: If one of them is on the meta device.
    """
    homes: dict[nn.Parameter, int] = {}
    for root in roots:
        for param in root.parameters():
            homes[param] = homes.get(param, 0) + 1
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    names = {param: name for name, param in module.named_parameters()}
    for child in module.modules():
        for name, param in child.named_parameters(recurse=False, remove_duplicate=False):
            if homes.get(param, 0) != 1 and param.is_floating_point():
                places.setdefault(param, []).append((child, name))
    for own in places:
        if own.is_meta:
            raise ValueError(
                f"The parameter {names[own]!r} is on the meta device, and belongs to {type(module).__name__} itself,"
                " to a container without forward(), or to several children. Give it values before the fit, or move it"
                " into a submodule that is called by its forward()."
            )
    dtypes = dict.fromkeys(param.dtype for param in places)
    return [
        Beside(list(chosen), list(chosen.values()))
        for chosen in ({param: at for param, at in places.items() if param.dtype == dtype} for dtype in dtypes)
    ]


@contextmanager
def set_aside(beside: Iterable[Beside]) -> Iterator[None]:
    """Remove these parameters from all other modules within, while other units are sharded."""
    kept: list[tuple[nn.Module, str, nn.Parameter]] = [
        (module, name, param)
        for each in beside
        for param, places in zip(each.parameters(), each._places, strict=True)
        for module, name in places
    ]
    for module, name, _ in kept:
        module._parameters[name] = None
    try:
        yield
    finally:
        for module, name, own in kept:
            module._parameters[name] = own  # keeps the order: the key was not removed
