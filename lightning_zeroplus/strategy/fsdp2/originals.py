"""Parameters that users have kept since before their module was sharded, as in ``self.first = list(net.parameters())``.

FSDP2 puts new parameters into the module. The earlier ones are emptied, and would be used as if they were the weights.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zeroplus.fsdp.whole import rules
from lightning_zeroplus.fsdp.whole.layout import BEFORE
from lightning_zeroplus.gradients.patches.specialize import generalize, specialize
from lightning_zeroplus.gradients.patches.transforms import is_wrapped
from lightning_zeroplus.weights.holders import held_weights

_NAME = "_sharded_parameter"
_SHARES = (
    "shares the memory of the weight {name!r}: a view with its graph, or a parameter of another module. Under DDP it"
    " would follow the weight; FSDP2 moves weights to shards. Take such tensors in `on_fit_start`, or keep copies."
)
#: Attributes that show values.
_VALUES = frozenset("data real imag T mT H mH".split())


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


class LeftBehind:
    """Mixin for a tensor with the memory that a weight had before it was sharded, and that cannot follow the weight."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse what needs values.

        Raises:
            RuntimeError: It would see the first values of the weight.
        """
        with torch._C.DisableTorchFunctionSubclass():
            attribute = getattr(getattr(func, "__self__", None), "__name__", None)
            is_attribute = func.__name__ in ("__get__", "__set__") and attribute not in _VALUES
            if is_attribute or rules.name_of(func) in rules.METADATA:
                return func(*args, **(kwargs or {}))
        (first, *_) = [each for each in tree_leaves((args, kwargs)) if isinstance(each, LeftBehind)]
        raise RuntimeError(f"A tensor that was made before the fit {vars(first)['_shares']}")


def note_kept(module: nn.Module) -> None:
    """Before ``module`` is sharded: find the tensors that share its weights' memory; they will follow the weights.

    Torch tells whether there are any, and the garbage collector knows which. Those that cannot follow say so when they
    are used, because many are not: a recurrent layer keeps the parameters that it had first. What the garbage collector
    does not know, such as the graph of an output that was kept, is nothing that a user reads.
    """
    held = held_weights(module)
    if not held:
        return
    ours = {id(tensor) for tensor in chain(module.parameters(), module.buffers(), (memory for _, memory in held))}
    found: dict[int, list[Tensor]] = {memory.untyped_storage().data_ptr(): [] for _, memory in held}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and id(each) not in ours and _has_storage(each):
            found.get(each.untyped_storage().data_ptr(), []).append(each)
    for param, memory in held:
        kept = found[memory.untyped_storage().data_ptr()]
        name = next(name for name, each in module.named_parameters() if each is param)
        follow = [each for each in kept if _can_follow(each, memory)]
        for each in kept:
            if all(each is not other for other in follow) and not isinstance(each, LeftBehind):
                each._shares = _SHARES.format(name=name)  # type: ignore[attr-defined]
                specialize(each, LeftBehind)
        vars(param)[BEFORE] = memory, follow


def _has_storage(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not is_wrapped(tensor)


def _can_follow(part: Tensor, whole: Tensor) -> bool:
    if type(part) is not Tensor or part.requires_grad or part.dtype != whole.dtype:
        return False
    first, last = whole.data_ptr(), whole.data_ptr() + whole.nbytes
    spans = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True)) + 1
    return first <= part.data_ptr() and part.data_ptr() + spans * part.element_size() <= last


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
