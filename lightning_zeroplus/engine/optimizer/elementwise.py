"""Does an optimizer need whole tensors? Found out by running it on a small tensor.

ZeRO gives an optimizer slices of a flat partition. For Adam that makes no difference. LARS and LAMB use the norm of a
tensor, Adafactor and Shampoo its rows and columns, Muon its singular vectors: on slices their updates are different.
So are those of optimizers with states in 8 or 4 bits, which have one scale for each block of a tensor.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_SHAPE = (8, 6)
# States of 8 or 4 bits have blocks of up to 2048 elements, and smaller tensors than 4096 keep theirs in fp32.
_LARGE = (64, 96)
_STEPS = 3
# Relative to the change of the weights: rounding is far below, another update rule far above.
_TOLERANCE = 1e-3
# Not a multiple of the row length, so that the cut is within a row, and within a block.
_FLAT_CUT = 20
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_NO_RULE = ("params", "lr", "initial_lr", "name", "param_names")


def needs_whole_tensors(optimizer: Optimizer, cut: Literal["flat", "rows"] = "flat") -> bool:
    """Step tensors whole and in two independent parts, and compare.

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
    with _asking(optimizer):
        # A small tensor first: some optimizers decompose matrices of as many rows as a vector has elements.
        return any(
            _differs(optimizer, group, _weights(group, shape), cut)
            for group in _kinds_of_groups(optimizer)
            for shape in (_SHAPE, _LARGE)
        )


def class_of_states(optimizer: Optimizer) -> type[Tensor] | None:
    """The tensor subclass in which an optimizer keeps states of a large parameter, as those of 8 bits in torchao.

    Args:
        optimizer: A torch optimizer; it does not change, see :func:`needs_whole_tensors`.

    Returns:
        The class; None: its states are ordinary tensors, or nothing can be found out.
    """
    if type(optimizer).__module__.startswith(("torch.optim.", "deepspeed.")):
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
    param = nn.Parameter(_matrix(group, _LARGE))
    try:
        clone = _copy(optimizer, group, param)
        param.grad = _gradients(param.detach())[0]
        clone.step()
    except Exception:  # see `_differs`
        return
    yield from (type(value) for value in clone.state.get(param, {}).values() if isinstance(value, Tensor))


def _differs(optimizer: Optimizer, group: dict[str, Any], weights: Tensor, cut: str) -> bool:
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
        at = tensor.shape[0] // 3  # within a block, too
        return tensor[:at], tensor[at:]
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
