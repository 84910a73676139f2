"""Parameters that users have kept since before their module was sharded, as in ``self.first = list(net.parameters())``.

FSDP2 puts new parameters into the module. The earlier ones are emptied, and would be used as if they were the weights.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_zeroplus.fsdp.whole.layout import BEFORE, same_memory
from lightning_zeroplus.gradients.patches.specialize import generalize, specialize
from lightning_zeroplus.gradients.patches.transforms import is_wrapped
from lightning_zeroplus.weights.holders import held_weights, holders

_NAME = "_sharded_parameter"


class StandsForSharded:
    """Mixin for an emptied parameter: whatever is done with it is done with the sharded one.

    Within ``torch._C.DisableTorchFunctionSubclass()`` it is the emptied one itself.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` with the sharded parameters."""
        args, kwargs = tree_map_only(StandsForSharded, _sharded, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = copy.deepcopy(_sharded(self), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _sharded(self).__reduce_ex__(protocol)


def note_kept(module: nn.Module) -> None:
    """Before ``module`` is sharded: find the tensors that share its weights' memory; they will follow the weights.

    Torch tells how many there are, and the garbage collector knows which.

    Raises:
        MisconfigurationException: If not all of them can follow.
    """
    held = held_weights(module)
    if not held:
        return
    ours = {id(tensor) for tensor in chain(module.parameters(), module.buffers(), (memory for _, memory in held))}
    found: dict[int, list[Tensor]] = {memory.untyped_storage().data_ptr(): [] for _, memory in held}
    for each in gc.get_objects():
        if type(each) is Tensor and id(each) not in ours and _has_storage(each):
            found.get(each.untyped_storage().data_ptr(), []).append(each)
    for param, memory in held:
        kept = found[memory.untyped_storage().data_ptr()]
        known = sum(map(_has_memory(memory), chain(module.parameters(), module.buffers())))
        known += sum(map(_has_memory(memory), (each for _, each in held)))
        if holders(memory) != known + len(kept) or not all(_is_within(each, memory) for each in kept):
            name = next(name for name, each in module.named_parameters() if each is param)
            raise MisconfigurationException(
                f"Something keeps the memory of {name!r}, such as a view with a gradient, an array or another module's"
                " parameter. Under DDP it would follow the weight; FSDP2 moves weights to shards. Take tensors of"
                " weights in `on_fit_start`, or keep copies."
            )
        vars(param)[BEFORE] = memory, kept


def _has_storage(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not is_wrapped(tensor)


def _has_memory(memory: Tensor) -> Callable[[Tensor], bool]:
    return partial(same_memory, memory)


def _is_within(part: Tensor, whole: Tensor) -> bool:
    first, last = whole.data_ptr(), whole.data_ptr() + whole.nbytes
    spans = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True)) + 1
    inside = first <= part.data_ptr() and part.data_ptr() + spans * part.element_size() <= last
    return inside and part.dtype == whole.dtype and not part.requires_grad


def _sharded(param: Any) -> Tensor:
    sharded: Tensor = vars(param)[_NAME]
    return sharded


def stand_for_sharded(originals: Mapping[Tensor, nn.Parameter]) -> None:
    """Let the parameters from before stand for the sharded ones, which are the keys."""
    for sharded, original in originals.items():
        setattr(original, _NAME, sharded)
        specialize(original, StandsForSharded)


def stand_for_themselves(originals: Mapping[Tensor, nn.Parameter]) -> None:
    """Undo :func:`stand_for_sharded`."""
    for original in originals.values():
        if vars(original).pop(_NAME, None) is not None:
            generalize(original, StandsForSharded)
