"""Does an optimizer need whole tensors? Found out by running it on a small tensor.

ZeRO gives an optimizer slices of a flat partition. For Adam that makes no difference. LARS and LAMB use the norm of a
tensor, Adafactor and Shampoo its rows and columns, Muon its singular vectors: on slices their updates are different.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_SHAPE = (8, 6)
_STEPS = 3
# Relative to the change of the weights: rounding is far below, another update rule far above.
_TOLERANCE = 1e-3
# Not a multiple of the row length, so that the cut is within a row.
_FLAT_CUT = 20
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_NO_RULE = ("params", "lr", "initial_lr", "name", "param_names")


def needs_whole_tensors(optimizer: Optimizer, cut: Literal["flat", "rows"] = "flat") -> bool:
    """Step a small tensor whole and in two independent parts, and compare.

    Copies of the optimizer, with the settings of each of its groups, do the steps. The optimizer's state, its
    parameters and the random number generators do not change.

    Args:
        optimizer: A torch optimizer; DeepSpeed's own are judged by name.
        cut: ``"flat"``: as ZeRO cuts a flattened tensor; ``"rows"``: along the first dimension.

    Returns:
        Whether the results differ, or only the whole tensor is accepted. Also False if nothing can be found out: the
        step needs a closure, or its updates are random.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("deepspeed."):
        return any(word in kind.__name__.lower() for word in ("lamb", "muon"))
    devices = sorted({param.device.index or 0 for param in _params(optimizer) if param.device.type != "cpu"})
    device_type = next((param.device.type for param in _params(optimizer) if param.device.type != "cpu"), "cuda")
    with torch.random.fork_rng(devices, device_type=device_type), torch.enable_grad():
        return any(_differs(optimizer, group, cut) for group in _kinds_of_groups(optimizer))


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


def _differs(optimizer: Optimizer, group: dict[str, Any], cut: str) -> bool:
    weights = torch.linspace(-1, 1, _SHAPE[0] * _SHAPE[1], device=group["params"][0].device)
    if _is_matrix(group):
        weights = weights.view(_SHAPE)
    try:
        whole = _stepped(optimizer, group, weights, _gradients(weights))
        again = _stepped(optimizer, group, weights, _gradients(weights))
    except Exception:  # a user's class that needs a closure, or more than a gradient
        return False
    way = float((whole - weights).abs().max())
    if not way > 0 or not torch.equal(whole, again):
        return False
    try:
        parts = [
            _stepped(optimizer, group, part, gradients)
            for part, *gradients in zip(*(_cut(tensor, cut) for tensor in (weights, *_gradients(weights))), strict=True)
        ]
    except Exception:
        return True
    together = torch.cat([part.flatten() for part in parts])
    return not float((together - whole.flatten()).abs().max()) <= _TOLERANCE * way


def _cut(tensor: Tensor, cut: str) -> tuple[Tensor, Tensor]:
    if cut == "rows":
        return tensor[: _SHAPE[0] // 2], tensor[_SHAPE[0] // 2 :]
    return tensor.flatten()[:_FLAT_CUT], tensor.flatten()[_FLAT_CUT:]


def _gradients(weights: Tensor) -> list[Tensor]:
    numbers = torch.arange(weights.numel(), device=weights.device, dtype=weights.dtype).view(weights.shape)
    return [torch.sin(numbers * (step + 2)) * (1 + numbers) / weights.numel() for step in range(_STEPS)]


def _stepped(optimizer: Optimizer, group: dict[str, Any], weights: Tensor, gradients: list[Tensor]) -> Tensor:
    """``weights`` after one step per gradient, by a copy of the optimizer with the settings of ``group``."""
    param = nn.Parameter(weights.clone())
    clone = _copy(optimizer, group, param)
    for gradient in gradients:
        param.grad = gradient.clone()
        clone.step()
    return param.detach()


def _copy(optimizer: Optimizer, group: dict[str, Any], param: nn.Parameter) -> Optimizer:
    """A copy of the optimizer for ``param`` alone, with the settings of ``group``."""
    # In the copy, references to parameters of the model become references to `param`: nothing large is copied.
    memo: dict[int, Any] = {id(each): param for each in _params(optimizer)}
    settings = copy.deepcopy({key: value for key, value in group.items() if key != "params"}, memo)
    groups = [{**settings, "params": [param], **_learning_rate(group)}]
    kind: Any = type(optimizer)
    if optimizer.state:  # made by the constructor, as in Adagrad
        return kind(groups)
    clone = object.__new__(kind)
    kept = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups", "step")}
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
