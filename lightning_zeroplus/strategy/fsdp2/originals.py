"""Parameters that users have kept since before their module was sharded, as in ``self.first = list(net.parameters())``.

FSDP2 puts new parameters into the module. The earlier ones are emptied, and would be used as if they were the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_zeroplus.gradients.patches.specialize import generalize, specialize

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
