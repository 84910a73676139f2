"""Steps of copies of an optimizer on small tensors, by which its rule is found out."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zeroplus.engine.upstream.several_calls import as_one_step, show_all_groups

SHAPE = (8, 6)
# States of 8 or 4 bits have blocks of up to 2048 elements, and smaller tensors than 4096 keep theirs in fp32.
LARGE = (64, 96)
STEPS = 3
MANY_STEPS = 20
# Of gradients: with large ones, what clips does so.
SCALES = (1.0, 1e3)
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_NO_RULE = ("params", "lr", "initial_lr", "name", "param_names")


@contextmanager
def asking(optimizer: Optimizer) -> Iterator[None]:
    """Wrap steps of copies: random numbers stay, and nothing is compiled."""
    devices = sorted({param.device.index or 0 for param in _params(optimizer) if param.device.type != "cpu"})
    device_type = next((param.device.type for param in _params(optimizer) if param.device.type != "cpu"), "cuda")
    eager = torch.compiler.set_stance("force_eager")
    with torch.random.fork_rng(devices, device_type=device_type), torch.enable_grad(), eager:
        yield


def kinds_of_groups(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """A group of each kind: groups that differ only in learning rate or name are of one kind."""
    seen = set()
    for group in optimizer.param_groups:
        settings = sorted((key, repr(value)) for key, value in group.items() if key not in _OF_NO_RULE)
        key = (_is_matrix(group), tuple(settings))
        if key not in seen and group["params"]:
            seen.add(key)
            yield group


def weights_of(group: dict[str, Any], shape: tuple[int, int]) -> Tensor:
    """A matrix of this shape, or a vector of as many elements for a group of vectors."""
    weights = _matrix(group, shape)
    return weights if _is_matrix(group) else weights.view(-1)


def _matrix(group: dict[str, Any], shape: tuple[int, int]) -> Tensor:
    return torch.linspace(-1, 1, shape[0] * shape[1], device=group["params"][0].device).view(shape)


def gradients_of(weights: Tensor, steps: int) -> list[Tensor]:
    """A gradient for each step."""
    numbers = torch.arange(weights.numel(), device=weights.device, dtype=weights.dtype).view(weights.shape)
    return [torch.sin(numbers * (step + 2)) * (1 + numbers) / weights.numel() for step in range(steps)]


def stepped(optimizer: Optimizer, group: dict[str, Any], weights: Tensor, gradients: list[Tensor]) -> Tensor:
    """``weights`` after one step per gradient, by a copy of the optimizer with the settings of ``group``."""
    ([after], _) = run(optimizer, group, [weights], [gradients])
    return after


def run(
    optimizer: Optimizer, group: dict[str, Any], tensors: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> tuple[list[Tensor], dict[str, Any]]:
    """As :func:`stepped` for several tensors in one group, and the group afterwards."""
    torch.manual_seed(0)
    params = [nn.Parameter(each.clone()) for each in tensors]
    clone = _copy(optimizer, (group, params))
    for now in zip(*gradients, strict=True):
        for param, gradient in zip(params, now, strict=True):
            param.grad = gradient.clone()
        clone.step()
    return [param.detach() for param in params], clone.param_groups[0]


def step_groups(
    optimizer: Optimizer, groups: list[dict[str, Any]], *, at_once: bool = False, see_all: bool = False
) -> list[Tensor]:
    """A tensor of each group after some steps, by a copy of the optimizer.

    Args:
        optimizer: A torch optimizer; it does not change.
        groups: Its groups.
        at_once: Step the groups together, and not one by one as upstream does.
        see_all: While a group is stepped, the others are in their places.
    """
    torch.manual_seed(0)
    params = [nn.Parameter(weights_of(group, SHAPE)) for group in groups]
    clone = _copy(optimizer, *((group, [param]) for group, param in zip(groups, params, strict=True)))
    if see_all:
        show_all_groups(clone)
    for step in range(1, MANY_STEPS + 1):
        for param in params:
            param.grad = SCALES[step % 2] * gradients_of(param.detach(), step)[-1]
        with nullcontext() if at_once else as_one_step([clone]):
            for called in [clone.param_groups] if at_once else [[group] for group in clone.param_groups]:
                every, clone.param_groups = clone.param_groups, called
                clone.step()
                clone.param_groups = every
    return [param.detach() for param in params]


def stepped_once(optimizer: Optimizer, group: dict[str, Any]) -> tuple[Optimizer | None, nn.Parameter]:
    """A copy after a step of a large matrix; None: it cannot step."""
    param = nn.Parameter(_matrix(group, LARGE))
    try:
        clone = _copy(optimizer, (group, [param]))
        (param.grad,) = gradients_of(param.detach(), 1)
        clone.step()
    except Exception:  # a user's class that needs a closure, or more than a gradient
        return None, param
    return clone, param


class _Asked(nn.Parameter):
    """A parameter that notes the attributes that it is asked for, and does not have."""

    asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        raise AttributeError(name)


def asked_of_parameters(optimizer: Optimizer, group: dict[str, Any]) -> set[str]:
    """The attributes that a step asks a parameter for, besides a tensor's own."""
    param = _Asked(_matrix(group, SHAPE))
    asked: set[str] = set()
    _Asked.asked = asked
    with suppress(Exception):  # a user's class that needs a closure, or more than a gradient
        clone = _copy(optimizer, (group, [param]))
        (param.grad,) = gradients_of(param.detach(), 1)
        clone.step()
    return asked


def _copy(optimizer: Optimizer, *groups_and_params: tuple[dict[str, Any], list[nn.Parameter]]) -> Optimizer:
    """A copy of the optimizer, with groups of these settings and parameters."""
    # In the copy, references to parameters of the model become references to these: nothing large is copied.
    memo: dict[int, Any] = {id(each): groups_and_params[0][1][0] for each in _params(optimizer)}
    groups = []
    for group, params in groups_and_params:
        settings = copy.deepcopy({key: value for key, value in group.items() if key != "params"}, memo)
        groups.append({**settings, "params": params, **_learning_rate(group)})
    kind: Any = type(optimizer)
    if optimizer.state:  # perhaps made by the constructor, as in Adagrad
        with suppress(TypeError):  # it has other arguments without defaults
            return cast("Optimizer", kind(groups))
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


def _params(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_matrix(group: dict[str, Any]) -> bool:
    # A parameter that is partitioned already has only one dimension.
    return any(len(getattr(param, "ds_shape", param.shape)) > 1 for param in group["params"])
