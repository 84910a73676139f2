"""What hooks did to a checkpoint's ``state_dict``, whose tensors may be partitioned or still in their files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils._pytree import tree_map_only

from lightning_zeroplus.gradients.patches.replacement import Replacement

#: What a tensor says of itself without its values.
_KNOWN = frozenset(
    "shape dtype ndim requires_grad is_leaf layout names grad grad_fn size dim ndimension numel nelement stride"
    " element_size is_floating_point is_complex is_contiguous itemsize nbytes __len__ __hash__".split()
)


class Chosen(NamedTuple):
    """The entries of a ``state_dict`` that are saved.

    Attributes:
        kept: Names of the parameters whose weights are saved, by each rank its part.
        extra: Entries that are saved whole: buffers, and what a hook has added.
    """

    kept: frozenset[str]
    extra: dict[str, Any]


def choose(state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], extra: Collection[str]) -> Chosen:
    """Sort the entries of ``checkpoint["state_dict"]``, which a hook or the user's ``state_dict()`` may have changed.

    Args:
        state: ``checkpoint["state_dict"]``.
        parameters: Parameters of the module by name; a tied one under each of its names.
        extra: Names of the other entries of the module's own ``state_dict()``.

    Raises:
        RuntimeError: If a renamed or copied entry is empty, because its parameter is partitioned.
    """
    kept, others = set(), {}
    for name, value in state.items():
        if name in parameters and _is_weight(value, parameters[name]):
            kept.add(name)
        elif (
            name not in extra
            and _is_empty(value)
            and any(_is_empty(param) or hasattr(param, "ds_id") for param in parameters.values())
        ):
            raise RuntimeError(
                f"The checkpoint's `state_dict` has {name!r}, which is the empty rest of a partitioned parameter: a"
                " hook has renamed or copied it. At ZeRO stage 3 it may only leave weights out. Rename them in the"
                " file that `lightning_zeroplus.export` writes. Nothing has been saved."
            )
        else:
            others[name] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
    return Chosen(frozenset(kept), others)


def _is_weight(value: Any, param: nn.Parameter) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return isinstance(value, Tensor) and (
            value is param
            or (_is_empty(value) and getattr(param, "ds_numel", 0) > 0)  # the hook may have gathered it since
            or (value.shape, value.dtype, value.data_ptr()) == (param.shape, param.dtype, param.data_ptr())
        )


def _is_empty(value: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return isinstance(value, Tensor) and not value.numel()


def saved_names(module: nn.Module) -> dict[str, str]:
    """The names of parameters in ``state_dict()``, by their own, where they differ: parts and hooks may rename.

    Args:
        module: Its own ``state_dict()`` is not called, which may leave out anything.
    """
    if not any(map(_names_itself, module.modules())):
        return {}
    own: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        own.setdefault(param, []).append(name)
    saved: dict[Any, list[str]] = {param: [] for param in own}
    for name, value in nn.Module.state_dict(module, keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            saved.setdefault(value, []).append(name)
    # A tied parameter has several names, in the same order. A hook may also leave some out, or add others.
    known = [(own[param], saved[param]) for param in own if len(own[param]) == len(saved[param])]
    return {name: other for names, others in known for name, other in zip(names, others, strict=True) if name != other}


def _names_itself(part: nn.Module) -> bool:
    cls = type(part)
    return bool(part._state_dict_hooks) or (cls.state_dict, cls._save_to_state_dict) != _OF_TORCH


_OF_TORCH = (nn.Module.state_dict, nn.Module._save_to_state_dict)


class Unread(Tensor):
    """A weight on the meta device that is read, whole, as soon as an operation needs its values.

    From then on it is an ordinary tensor on the CPU, for whoever uses it: results are ordinary tensors, writes to it
    and to its views stay.

    Attributes:
        read: Reads the weight.
        whole: The weight, if it was read.
    """

    read: Callable[[], Tensor]
    whole: Tensor | None

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> Unread:
        """A weight of this shape and dtype."""
        unread = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        unread.read, unread.whole = read, None
        return unread

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run what needs no values as it is, everything else on the whole weights."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            accessor = func.__name__ in ("__get__", "__set__")
            name = getattr(getattr(func, "__self__", None), "__name__", "") if accessor else func.__name__
            if name in _KNOWN and func.__name__ != "__set__":
                return func(*args, **kwargs)
            args, kwargs = tree_map_only(Unread, _whole, (args, kwargs))
            return func(*args, **kwargs)


def _whole(tensor: Unread) -> Tensor:
    if tensor.whole is None:
        tensor.whole = tensor.read()
    return tensor.whole


class Placeholders:
    """A ``state_dict`` for ``on_load_checkpoint``, whose weights are still in their files.

    A hook may drop, rename, replace and change weights, and add tensors. What it looks at is read whole on its rank;
    everything else is read later, by each rank its part.

    Args:
        weights: The weights, by name.
        extra: Entries that are not weights, unchanged.
    """

    def __init__(self, weights: Mapping[str, Unread], extra: Mapping[str, Any]) -> None:
        self._weights = weights
        self.state_dict: dict[str, Any] = {**weights, **extra}
        self._offered = dict(self.state_dict)

    def changed(self, state: Mapping[str, Any]) -> bool:
        """Whether a hook has changed any entry, or may have."""
        same = state.keys() == self._offered.keys() and all(state[name] is self._offered[name] for name in state)
        return not same or any(value.whole is not None for value in self._weights.values())

    def earlier_names(self, state: Mapping[str, Any]) -> dict[str, str]:
        """The names that weights had before, by their names in ``state``: see :func:`earlier_names`."""
        return earlier_names(self._weights, state)


def earlier_names(offered: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, str]:
    """The names that entries of ``state`` had before hooks have renamed them, by their names now.

    Args:
        offered: The ``state_dict`` that the hooks got, still alive: the ids of its tensors are theirs.
        state: What they have made of it. An entry that is another tensor now is not found.
    """
    names = {id(value): name for name, value in offered.items()}
    return {name: names[id(value)] for name, value in state.items() if names.get(id(value), name) != name}


class Loaded(NamedTuple):
    """What a module's ``load_state_dict`` would load.

    Attributes:
        state: The entries.
        strict: Whether it refuses missing and unexpected ones.
    """

    state: Mapping[str, Any]
    strict: bool


def changes_what_it_loads(module: nn.Module) -> bool:
    """Whether the user's code has a say in ``module.load_state_dict``: an override of it, or of a part, or a hook."""
    return _overrides_all(module) or any(map(_has_say, module.modules()))


def _overrides_all(module: nn.Module) -> bool:
    return type(module).load_state_dict is not nn.Module.load_state_dict


def _has_say(part: nn.Module) -> bool:
    return bool(_hooks_of(part)) or _overrides_load(type(part))


def _overrides_load(cls: type[nn.Module]) -> bool:
    return not cls._load_from_state_dict.__module__.startswith(("torch.", "torchmetrics."))


#: FSDP2's hooks change no entry. Those of torch's ``checkpoint_wrapper`` give a layer the names that it saves by.
_TORCHS = ("torch.distributed.fsdp.", "torch.distributed.algorithms._checkpoint.")


def _hooks_of(part: nn.Module) -> dict[int, Any]:
    """By number; without :data:`_TORCHS`."""
    return {
        number: hook
        for number, hook in part._load_state_dict_pre_hooks.items()
        if not getattr(hook, "__module__", "").startswith(_TORCHS)
    }


def what_it_loads(module: nn.Module, state: Mapping[str, Any], strict: bool) -> Loaded:
    """Call ``module.load_state_dict(state, strict=strict)``, but load nothing.

    Overrides and hooks may rename, change, add and drop entries.

    Args:
        module: The module.
        state: The ``state_dict`` of a checkpoint; it is not changed.
        strict: As for ``load_state_dict``.

    Raises:
        RuntimeError: If a hook reports errors, or an override does not call ``super().load_state_dict()``.
    """
    found: list[Loaded] = []
    errors: list[str] = []
    original = nn.Module.load_state_dict

    def note(self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if self is not module:
            return original(self, state_dict, strict, assign)
        metadata = getattr(state_dict, "_metadata", {})
        with Replacement(nn.Module, "_load_from_state_dict", _call_hooks)():
            found.append(Loaded(_visit(module, "", dict(state_dict), metadata, errors), strict))
        return _IncompatibleKeys([], [])

    with Replacement(nn.Module, "load_state_dict", note)():
        module.load_state_dict(dict(state), strict=strict)
    if not found:
        raise RuntimeError(
            f"`{type(module).__name__}.load_state_dict` does not call `super().load_state_dict()`, which loads a"
            " checkpoint here. Call it, or change the weights in `on_load_checkpoint`."
        )
    if errors:
        raise RuntimeError(f"Loading the `state_dict` into {type(module).__name__}: {'; '.join(errors)}")
    return found[-1]


def _call_hooks(part: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for hook in _hooks_of(part).values():
        hook(state, prefix, *rest)


def _visit(
    part: nn.Module, prefix: str, state: dict[str, Any], metadata: Mapping[str, Any], errors: list[str]
) -> dict[str, Any]:
    """As in torch, a part gets the entries below it, after what it is a part of."""
    if _has_say(part):
        load = part._load_from_state_dict if _overrides_load(type(part)) else partial(_call_hooks, part)
        load(state, prefix, metadata.get(prefix[:-1], {}), True, [], [], errors)
    for name, child in part._modules.items():
        if child is not None and any(map(_has_say, child.modules())):
            below = f"{prefix}{name}."
            own = {key: value for key, value in state.items() if key.startswith(below)}
            others = {key: value for key, value in state.items() if key not in own}
            state = others | _visit(child, below, own, metadata, errors)
    return state


@contextmanager
def loading_as_it_is(module: nn.Module) -> Iterator[None]:
    """Load within what :func:`what_it_loads` has returned: the user's code has had its turn."""
    taken = [(part._load_state_dict_pre_hooks, _hooks_of(part)) for part in module.modules()]
    shadowed = [(part, "_load_from_state_dict") for part in module.modules() if _overrides_load(type(part))]
    if _overrides_all(module):
        shadowed.append((module, "load_state_dict"))
    for there, hooks in taken:
        for number in hooks:
            del there[number]
    for part, name in shadowed:
        object.__setattr__(part, name, partial(getattr(nn.Module, name), part))
    try:
        yield
    finally:
        for part, name in shadowed:
            object.__delattr__(part, name)
        for there, hooks in taken:
            there.update(hooks)
