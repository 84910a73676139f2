"""Does an optimizer need whole tensors, or all of them? Found out by running it on small ones.

ZeRO gives an optimizer slices of a flat partition. For Adam that makes no difference. LARS and LAMB use the norm of a
tensor, Adafactor and Shampoo its rows and columns, Muon its singular vectors: on slices their updates are different.
So are those of optimizers with states in 8 or 4 bits, which have one scale for each block of a tensor. Others use all
gradients together, such as Prodigy, which estimates one learning rate, and those that clip by a global norm.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_zeroplus.gradients.patches.replacement import Replacement

_SHAPE = (8, 6)
# States of 8 or 4 bits have blocks of up to 2048 elements, and smaller tensors than 4096 keep theirs in fp32.
_LARGE = (64, 96)
_STEPS = 3
_OTHER_SHAPE = (5, 9)
_MANY_STEPS = 20
# Of gradients: with large ones, what clips does so.
_SCALES = (1.0, 1e3)
# Relative to the change of the weights: rounding is far below, another update rule far above.
_TOLERANCE = 1e-3
# The same operations on the same tensors.
_SAME = 1e-6
# Not a multiple of the row length, so that the cut is within a row, and within a block.
_FLAT_CUT = 20
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_UPSTREAM = ("torch.optim.", "deepspeed.")
_OF_NO_RULE = ("params", "lr", "initial_lr", "name", "param_names")


def needs_whole_tensors(optimizer: Optimizer) -> bool:
    """Step tensors whole and in two independent parts, and compare.

    Copies of the optimizer, with the settings of each of its groups, do the steps. The optimizer's state, its
    parameters and the random number generators do not change.

    Args:
        optimizer: A torch optimizer; DeepSpeed's own are judged by name.

    Returns:
        Whether the results differ, or only the whole tensor is accepted. Also True if its updates are random in spite
        of equal seeds, or if it reduces a tensor without effect here, for example to clip. False if nothing can be
        found out, because the step needs a closure.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("deepspeed."):
        return any(word in kind.__name__.lower() for word in ("lamb", "muon"))
    with _asking(optimizer):
        # A small tensor first: some optimizers decompose matrices of as many rows as a vector has elements.
        differs = any(
            _differs(optimizer, group, _weights(group, shape))
            for group in _kinds_of_groups(optimizer)
            for shape in (_SHAPE, _LARGE)
        )
        is_known = kind.__module__.startswith(_UPSTREAM)
        return differs or (not is_known and any(_reduces(optimizer, group) for group in _kinds_of_groups(optimizer)))


def couples_tensors(optimizer: Optimizer) -> bool:
    """Whether the update of a tensor depends on the gradients of others.

    Two tensors are stepped together and each alone, by copies as in :func:`needs_whole_tensors`. What the steps have
    written to the settings of the group is compared, too: an estimate may need many steps to change an update.

    Args:
        optimizer: A torch optimizer; it does not change.

    Returns:
        Whether the results differ. Also False if nothing can be found out, because the step needs a closure or uses
        random numbers.
    """
    if type(optimizer).__module__.startswith(_UPSTREAM):
        return False
    wrapped = [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
    if wrapped:  # which a copy would step with other groups
        return any(map(couples_tensors, wrapped))
    with _asking(optimizer):
        return any(_couples(optimizer, group, scale) for group in _kinds_of_groups(optimizer) for scale in _SCALES)


def calls_collectives(optimizer: Optimizer) -> bool:
    """Whether the step calls collectives, in which all ranks must take part with the same parameters.

    Args:
        optimizer: A torch optimizer; it does not change.
    """
    if type(optimizer).__module__.startswith(_UPSTREAM):
        return False
    called: list[Any] = []

    def refuse(group: Any) -> Any:
        called.append(group)
        raise RuntimeError("a collective within an optimizer's step")

    with _asking(optimizer), Replacement(distributed_c10d, "_rank_not_in_group", refuse)():
        for group in _kinds_of_groups(optimizer):
            _stepped_once(optimizer, group)
    return bool(called)


def has_common_states(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.state`` has states that belong to no parameter, under a key of another type.

    Args:
        optimizer: A torch optimizer; it does not change.
    """
    if type(optimizer).__module__.startswith(_UPSTREAM):
        return False
    with _asking(optimizer):
        made = [optimizer, *(_stepped_once(optimizer, group)[0] for group in _kinds_of_groups(optimizer))]
    return any(not isinstance(key, Tensor) for each in made if each is not None for key in each.state)


def class_of_states(optimizer: Optimizer) -> type[Tensor] | None:
    """The tensor subclass in which an optimizer keeps states of a large parameter, as those of 8 bits in torchao.

    Args:
        optimizer: A torch optimizer; it does not change, see :func:`needs_whole_tensors`.

    Returns:
        The class; None: its states are ordinary tensors, or nothing can be found out.
    """
    if type(optimizer).__module__.startswith(_UPSTREAM):
        return None
    with _asking(optimizer):
        found = (cls for group in _kinds_of_groups(optimizer) for cls in _classes_of_states(optimizer, group))
        return next((cls for cls in found if cls is not Tensor), None)


@contextmanager
def _asking(optimizer: Optimizer) -> Iterator[None]:
    """Wrap steps of copies: random numbers stay, and nothing is compiled."""
    devices = sorted({param.device.index or 0 for param in _params(optimizer) if param.device.type != "cpu"})
    device_type = next((param.device.type for param in _params(optimizer) if param.device.type != "cpu"), "cuda")
    eager = torch.compiler.set_stance("force_eager")
    with torch.random.fork_rng(devices, device_type=device_type), torch.enable_grad(), eager:
        yield


def _params(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _kinds_of_groups(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """A group of each kind: groups that differ only in learning rate or name are of one kind."""
    seen = set()
    for group in optimizer.param_groups:
        settings = sorted((key, repr(value)) for key, value in group.items() if key not in _OF_NO_RULE)
        key = (_is_matrix(group), tuple(settings))
        if key not in seen and group["params"]:
            seen.add(key)
            yield group


def _is_matrix(group: dict[str, Any]) -> bool:
    # A parameter that is partitioned already has only one dimension.
    return any(len(getattr(param, "ds_shape", param.shape)) > 1 for param in group["params"])


def _weights(group: dict[str, Any], shape: tuple[int, int]) -> Tensor:
    weights = _matrix(group, shape)
    return weights if _is_matrix(group) else weights.view(-1)


def _matrix(group: dict[str, Any], shape: tuple[int, int]) -> Tensor:
    return torch.linspace(-1, 1, shape[0] * shape[1], device=group["params"][0].device).view(shape)


def _classes_of_states(optimizer: Optimizer, group: dict[str, Any]) -> Iterator[type[Tensor]]:
    clone, param = _stepped_once(optimizer, group)
    if clone is not None:
        yield from (type(value) for value in clone.state.get(param, {}).values() if isinstance(value, Tensor))


def _stepped_once(optimizer: Optimizer, group: dict[str, Any]) -> tuple[Optimizer | None, nn.Parameter]:
    param = nn.Parameter(_matrix(group, _LARGE))
    try:
        clone = _copy(optimizer, group, [param])
        (param.grad,) = _gradients(param.detach(), 1)
        clone.step()
    except Exception:  # see `_differs`
        return None, param
    return clone, param


class _Reductions(TorchDispatchMode):
    """Notes whether an operation makes fewer elements of at least ``numel``."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self._numel = numel
        self.are_there = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = ([each.numel() for each in tree_leaves(of) if isinstance(each, Tensor)] for of in (args, result))
        if not func.is_view and made and max(made) < self._numel <= max(given, default=0):
            self.are_there = True
        return result


def _reduces(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    weights = _weights(group, _SHAPE)
    try:
        with _Reductions(weights.numel()) as reductions:
            _stepped(optimizer, group, weights, _gradients(weights, _STEPS))
    except Exception:  # see `_differs`
        return False
    return reductions.are_there


def _couples(optimizer: Optimizer, group: dict[str, Any], scale: float) -> bool:
    tensors = [_weights(group, shape) for shape in (_SHAPE, _OTHER_SHAPE)]
    gradients = [[scale * each for each in _gradients(tensor, _MANY_STEPS)] for tensor in tensors]
    try:
        together, settings = _run(optimizer, group, tensors, gradients)
        after = torch.get_rng_state()
        torch.manual_seed(0)
        if not torch.equal(torch.get_rng_state(), after):
            return False
        again, _ = _run(optimizer, group, tensors, gradients)
        alone = [_run(optimizer, group, [each], [its]) for each, its in zip(tensors, gradients, strict=True)]
    except Exception:  # see `_differs`
        return False
    if not all(map(torch.equal, together, again)):
        return False
    if any(_differ(settings, each) for _, each in alone):
        return True
    return any(
        bool(after.isfinite().all()) and float((after - own).abs().max()) > _SAME * float((after - before).abs().max())
        for before, after, ([own], _) in zip(tensors, together, alone, strict=True)
    )


def _differ(settings: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether numbers in two groups differ."""
    numbers = {key: float(each) for key, each in settings.items() if _is_number(each)}
    return any(_is_number(others.get(key)) and float(others[key]) != each for key, each in numbers.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _differs(optimizer: Optimizer, group: dict[str, Any], weights: Tensor) -> bool:
    # Those of others may warm up, and be elementwise until then.
    every = _gradients(weights, _STEPS if type(optimizer).__module__.startswith(_UPSTREAM) else _MANY_STEPS)
    try:
        whole = _stepped(optimizer, group, weights, every)
        again = _stepped(optimizer, group, weights, every)
    except Exception:  # a user's class that needs a closure, or more than a gradient
        return False
    way = float((whole - weights).abs().max())
    if not way > 0:
        return False
    if not torch.equal(whole, again):
        return True
    try:
        parts = [
            _stepped(optimizer, group, part, gradients)
            for part, *gradients in zip(*(_cut(tensor) for tensor in (weights, *every)), strict=True)
        ]
    except Exception:
        return True
    together = torch.cat([part.flatten() for part in parts])
    return not float((together - whole.flatten()).abs().max()) <= _TOLERANCE * way


def _cut(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """As ZeRO cuts a flattened tensor."""
    return tensor.flatten()[:_FLAT_CUT], tensor.flatten()[_FLAT_CUT:]


def _gradients(weights: Tensor, steps: int) -> list[Tensor]:
    numbers = torch.arange(weights.numel(), device=weights.device, dtype=weights.dtype).view(weights.shape)
    return [torch.sin(numbers * (step + 2)) * (1 + numbers) / weights.numel() for step in range(steps)]


def _stepped(optimizer: Optimizer, group: dict[str, Any], weights: Tensor, gradients: list[Tensor]) -> Tensor:
    """``weights`` after one step per gradient, by a copy of the optimizer with the settings of ``group``."""
    ([after], _) = _run(optimizer, group, [weights], [gradients])
    return after


def _run(
    optimizer: Optimizer, group: dict[str, Any], tensors: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> tuple[list[Tensor], dict[str, Any]]:
    """As :func:`_stepped` for several tensors in one group, and the group afterwards."""
    torch.manual_seed(0)
    params = [nn.Parameter(each.clone()) for each in tensors]
    clone = _copy(optimizer, group, params)
    for now in zip(*gradients, strict=True):
        for param, gradient in zip(params, now, strict=True):
            param.grad = gradient.clone()
        clone.step()
    return [param.detach() for param in params], clone.param_groups[0]


def _copy(optimizer: Optimizer, group: dict[str, Any], params: list[nn.Parameter]) -> Optimizer:
    """A copy of the optimizer for ``params`` alone, with the settings of ``group``."""
    # In the copy, references to parameters of the model become references to these: nothing large is copied.
    memo: dict[int, Any] = {id(each): params[0] for each in _params(optimizer)}
    settings = copy.deepcopy({key: value for key, value in group.items() if key != "params"}, memo)
    groups = [{**settings, "params": params, **_learning_rate(group)}]
    kind: Any = type(optimizer)
    if optimizer.state:  # made by the constructor, as in Adagrad
        return kind(groups)
    clone = object.__new__(kind)
    own = {key: each for key, each in vars(optimizer).items() if not isinstance(each, MethodType)}  # without routes
    kept = {key: value for key, value in own.items() if key not in ("state", "param_groups", "step")}
    clone.__dict__.update(copy.deepcopy(kept, memo))
    # A scheduler has wrapped the real optimizer's `step` (left out above), and users have registered hooks.
    clone.__dict__.update({name: OrderedDict() for name in _HOOKS})
    clone.state, clone.param_groups = defaultdict(dict), groups
    return clone


def _learning_rate(group: dict[str, Any]) -> dict[str, Any]:
    # A warm-up may begin at zero, where no weight changes.
    if "lr" not in group:
        return {}
    rate = group.get("initial_lr", group["lr"])
    chosen = float(rate) or 1e-3
    return {"lr": torch.full_like(rate, chosen) if isinstance(rate, Tensor) else chosen}
