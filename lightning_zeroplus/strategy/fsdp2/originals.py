"""Parameters that users have kept since before their module was sharded, as in ``self.first = list(net.parameters())``.

FSDP2 puts new parameters into the module. The earlier ones are emptied, and would be used as if they were the weights.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple

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


class Kept(NamedTuple):
    """Tensors of users that share the memory of weights.

    Attributes:
        followers: By parameter, its memory, and the tensors with some of it that can follow.
        others: The tensors that cannot, each with the name of a weight.
        outside: The parameters whose memory others than torch have.
    """

    followers: dict[nn.Parameter, tuple[Tensor, list[Tensor]]]
    others: list[tuple[Any, str]]
    outside: set[nn.Parameter]

    def take_leave(self) -> None:
        """The parameters are sharded: note the followers for them, and let the others say that they do not follow.

        Only when they are used, because many are not: a recurrent layer keeps the parameters that it had first.
        """
        for param, (memory, tensors) in self.followers.items():
            vars(param)[BEFORE] = memory, tensors, param in self.outside
        for tensor, name in self.others:
            tensor._shares = _SHARES.format(name=name)
            specialize(tensor, LeftBehind)


def find_kept(module: nn.Module) -> Kept:
    """Find the tensors that share the memory of the weights of ``module``, which is to be sharded.

    Torch tells whether there are any, and the garbage collector knows which. What it does not know, such as the graph
    of an output that was kept, is nothing that a user reads. Nor does it know numpy's arrays, but it knows the tensors
    that they were made of.
    """
    kept = Kept({}, [], set())
    held: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}  # by address of the storage
    for param, memory in held_weights(module):
        held.setdefault(memory.untyped_storage().data_ptr(), []).append((param, memory))
    if held:
        names = {param: name for name, param in module.named_parameters()}
        known = chain(module.parameters(), (memory for each in held.values() for _, memory in each))
        _find(kept, held, {id(tensor) for tensor in known}, names)
        outside = _referred_from_outside([each for _, tensors in kept.followers.values() for each in tensors])
        kept.outside.update(
            param for param, (_, tensors) in kept.followers.items() if any(id(each) in outside for each in tensors)
        )
    return kept


def _find(kept: Kept, held: Mapping[int, Any], ours: set[int], names: Mapping[nn.Parameter, str]) -> None:
    for each in gc.get_objects():
        if type(each) not in (Tensor, nn.Parameter) or id(each) in ours or not _has_storage(each):
            continue
        weights = held.get(each.untyped_storage().data_ptr(), [])
        home = next((weight for weight in weights if _can_follow(each, weight[1])), None)
        if home is not None:
            kept.followers.setdefault(home[0], (home[1], []))[1].append(each)
        elif weights:
            kept.others.append((each, names[weights[0][0]]))


def _referred_from_outside(tensors: list[Tensor]) -> set[int]:
    """The ids of the tensors to which others refer than the garbage collector knows: arrays, or running functions."""
    known = Counter(id(each) for referrer in gc.get_referrers(*tensors) for each in gc.get_referents(referrer))
    # Two references are the loop's variable and the argument.
    return {id(each) for each in tensors if sys.getrefcount(each) > known[id(each)] + 2}


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
