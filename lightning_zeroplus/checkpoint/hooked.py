"""What hooks have made of a checkpoint's ``state_dict``, where its tensors are not, or not whole, in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Chosen(NamedTuple):
    """What of a ``state_dict`` is saved.

    Attributes:
        kept: Names of parameters whose weights the ranks save, each its part.
        extra: What is saved as it is: buffers, and tensors that a hook has put there.
    """

    kept: frozenset[str]
    extra: dict[str, Any]


def choose(state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], extra: Collection[str]) -> Chosen:
    """Sort what ``on_save_checkpoint``, or a ``state_dict()`` of the user's, has left in ``checkpoint["state_dict"]``.

    Args:
        state: It.
        parameters: Parameters of the module by name, tied ones by each.
        extra: What else the module's own ``state_dict()`` has.

    Raises:
        RuntimeError: If an entry that is not the module's is empty, because its parameter is partitioned.
    """
    kept, others = set(), {}
    for name, value in state.items():
        if name in parameters and _is_weight(value, parameters[name]):
            kept.add(name)
        elif name not in extra and _is_empty(value) and any(map(_is_empty, parameters.values())):
            raise RuntimeError(
                f"The checkpoint's `state_dict` has {name!r}, which is the empty rest of a partitioned parameter: a"
                " hook has renamed or copied it. At ZeRO stage 3 keep the names and leave entries out, or rename what"
                " `lightning_zeroplus.export` writes. Nothing has been saved."
            )
        else:
            others[name] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
    return Chosen(frozenset(kept), others)


def _is_weight(value: Any, param: nn.Parameter) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return isinstance(value, Tensor) and (
            value is param
            or (value.shape, value.dtype, value.data_ptr()) == (param.shape, param.dtype, param.data_ptr())
        )


def _is_empty(value: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return isinstance(value, Tensor) and not value.numel()


class Placeholders:
    """A ``state_dict`` for ``on_load_checkpoint``, whose weights are still in their files.

    They are tensors on the meta device, of their shapes and dtypes. A hook may drop or rename them, and put tensors of
    its own beside or in their place.

    Args:
        shapes: Of the weights, by name.
        dtypes: Likewise.
        extra: Entries that are not weights, unchanged.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], extra: Mapping[str, Any]
    ) -> None:
        weights = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()}
        self._names = {id(value): name for name, value in weights.items()}
        self._weights = weights  # kept alive: an id means nothing without
        self.state_dict: dict[str, Any] = {**weights, **extra}
        self._offered = dict(self.state_dict)

    def changed(self, state: Mapping[str, Any]) -> bool:
        """Whether a hook has left anything else than what it has found."""
        same = state.keys() == self._offered.keys() and all(state[name] is self._offered[name] for name in state)
        return not same

    def stored_names(self, state: Mapping[str, Any]) -> dict[str, str]:
        """The names in the files, by those in ``state``; of weights that are still there.

        Raises:
            RuntimeError: If a hook has computed with a weight, of which it had only the shape.
        """
        stored = {}
        for name, value in state.items():
            if id(value) in self._names:
                stored[name] = self._names[id(value)]
            elif isinstance(value, Tensor) and value.is_meta:
                raise RuntimeError(
                    f"`on_load_checkpoint` has computed {name!r} from weights of a sharded checkpoint, which are read"
                    " later, by each rank its part: there it may drop, rename and replace them. Write them to a"
                    " file with `lightning_zeroplus.export`, change that, and give it as `ckpt_path`. Nothing has been"
                    " loaded."
                )
        return stored
