"""Does an optimizer need whole tensors, or all of them? Found out by running it on small ones.

ZeRO gives an optimizer slices of a flat partition. For Adam that makes no difference. LARS and LAMB use the norm of a
tensor, Adafactor and Shampoo its rows and columns, Muon its singular vectors: on slices their updates are different.
So are those of optimizers with states in 8 or 4 bits, which have one scale for each block of a tensor. Others use all
gradients together, such as Prodigy, which estimates one learning rate, and those that clip by a global norm.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_zeroplus.engine.optimizer.copies import (
    LARGE,
    MANY_STEPS,
    SCALES,
    SHAPE,
    STEPS,
    asked_of_parameters,
    asking,
    gradients_of,
    kinds_of_groups,
    run,
    step_groups,
    stepped,
    stepped_once,
    weights_of,
)
from lightning_zeroplus.engine.upstream.several_calls import UPSTREAM, show_all_groups
from lightning_zeroplus.gradients.patches.replacement import Replacement
from lightning_zeroplus.weights.partitioned.alike import looking, users_attributes
from lightning_zeroplus.weights.partitioned.copies import own_class

_OTHER_SHAPE = (5, 9)
# Relative to the change of the weights: rounding is far below, another update rule far above.
_TOLERANCE = 1e-3
# The same operations on the same tensors.
_SAME = 1e-6
# Not a multiple of the row length, so that the cut is within a row, and within a block.
_FLAT_CUT = 20


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
    if knows_parameters(optimizer):
        looking.add(optimizer)
        return True
    with asking(optimizer):
        # A small tensor first: some optimizers decompose matrices of as many rows as a vector has elements.
        differs = any(
            _differs(optimizer, group, weights_of(group, shape))
            for group in kinds_of_groups(optimizer)
            for shape in (SHAPE, LARGE)
        )
        is_known = kind.__module__.startswith(UPSTREAM)
        return differs or (not is_known and any(_reduces(optimizer, group) for group in kinds_of_groups(optimizer)))


def knows_parameters(optimizer: Optimizer) -> bool:
    """Whether an optimizer may look at the class of a parameter, or at an attribute that was set on it.

    Args:
        optimizer: A torch optimizer; it does not change.

    Returns:
        Whether parameters have a class of the user's, or a step asks for one of their attributes.
    """
    if type(optimizer).__module__.startswith(UPSTREAM):
        return False
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(own_class(param) is not nn.Parameter for param in params if isinstance(param, nn.Parameter)):
        return True
    names = {name for param in params for name in users_attributes(param)}
    if not names:
        return False
    with asking(optimizer):
        return any(not names.isdisjoint(asked_of_parameters(optimizer, group)) for group in kinds_of_groups(optimizer))


def knows_identities(optimizer: Optimizer) -> bool:
    """Whether an optimizer has the ``id`` of some of its parameters, or has them as keys or in a set.

    Args:
        optimizer: A torch optimizer; it does not change.
    """
    if type(optimizer).__module__.startswith(UPSTREAM):
        return False
    ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
    kept = [value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")]
    kept += [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    return any(_has_one(value, ids) for value in kept)


def _has_one(value: Any, ids: set[int], depth: int = 3) -> bool:
    if isinstance(value, int):
        return value in ids
    if not depth:
        return False
    if isinstance(value, dict | set | frozenset) and any(id(key) in ids for key in value if isinstance(key, Tensor)):
        return True
    inner = (*value.keys(), *value.values()) if isinstance(value, dict) else value
    return isinstance(inner, list | tuple | set | frozenset) and any(_has_one(each, ids, depth - 1) for each in inner)


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
    if type(optimizer).__module__.startswith(UPSTREAM):
        return False
    wrapped = [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
    if wrapped:  # which a copy would step with other groups
        return any(map(couples_tensors, wrapped))
    with asking(optimizer):
        return any(_couples(optimizer, group, scale) for group in kinds_of_groups(optimizer) for scale in SCALES)


def needs_all_groups(optimizer: Optimizer) -> bool | None:
    """Whether the update of a group depends on its position among the others.

    Copies step the groups at once; one by one, as upstream does; and one by one with the others in their places,
    without parameters.

    Args:
        optimizer: A torch optimizer; it does not change.

    Returns:
        Whether only the third is equal to the first; None: the third is not, either. Also False if nothing can be
        found out, because the step needs a closure or uses random numbers.
    """
    groups = [group for group in optimizer.param_groups if group["params"]]
    if type(optimizer).__module__.startswith(UPSTREAM) or len(groups) < 2:
        return False
    with asking(optimizer):
        try:
            together, again = (step_groups(optimizer, groups, at_once=True) for _ in range(2))
        except Exception:  # see `_differs`
            return False
        if not all(map(torch.equal, together, again)):
            return False
        for see_all in (False, True):
            with suppress(Exception):
                apart = step_groups(optimizer, groups, see_all=see_all)
                if all(torch.allclose(*pair, rtol=_SAME, atol=_SAME) for pair in zip(together, apart, strict=True)):
                    return see_all
    return None


def show_groups_where_needed(optimizers: Iterable[Optimizer]) -> None:
    """Let steps of a group see the others, for optimizers that :func:`needs_all_groups`."""
    for optimizer in optimizers:
        if needs_all_groups(optimizer) is not False:
            show_all_groups(optimizer)


def draws_random_numbers(optimizer: Optimizer) -> bool:
    """Whether steps draw random numbers, of torch or of Python's ``random``.

    Args:
        optimizer: A torch optimizer; it does not change.
    """
    if type(optimizer).__module__.startswith(UPSTREAM):
        return False
    before = random.getstate()
    try:
        with asking(optimizer), _Draws() as draws:
            for group in kinds_of_groups(optimizer):
                weights = weights_of(group, SHAPE)
                with suppress(Exception):  # see `_differs`
                    stepped(optimizer, group, weights, gradients_of(weights, MANY_STEPS))
        return draws.are_there or random.getstate() != before
    finally:
        random.setstate(before)


def calls_collectives(optimizer: Optimizer) -> bool:
    """Whether the step calls collectives, in which all ranks must take part with the same parameters.

    Args:
        optimizer: A torch optimizer; it does not change.
    """
    if type(optimizer).__module__.startswith(UPSTREAM):
        return False
    called: list[Any] = []

    def refuse(group: Any) -> Any:
        called.append(group)
        raise RuntimeError("a collective within an optimizer's step")

    with asking(optimizer), Replacement(distributed_c10d, "_rank_not_in_group", refuse)():
        for group in kinds_of_groups(optimizer):
            stepped_once(optimizer, group)
    return bool(called)


def has_common_states(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.state`` has states that belong to no parameter, under a key of another type.

    Args:
        optimizer: A torch optimizer; it does not change.
    """
    if type(optimizer).__module__.startswith(UPSTREAM):
        return False
    with asking(optimizer):
        made = [optimizer, *(stepped_once(optimizer, group)[0] for group in kinds_of_groups(optimizer))]
    return any(not isinstance(key, Tensor) for each in made if each is not None for key in each.state)


def class_of_states(optimizer: Optimizer) -> type[Tensor] | None:
    """The tensor subclass in which an optimizer keeps states of a large parameter, as those of 8 bits in torchao.

    Args:
        optimizer: A torch optimizer; it does not change, see :func:`needs_whole_tensors`.

    Returns:
        The class; None: its states are ordinary tensors, or nothing can be found out.
    """
    if type(optimizer).__module__.startswith(UPSTREAM):
        return None
    with asking(optimizer):
        found = (cls for group in kinds_of_groups(optimizer) for cls in _classes_of_states(optimizer, group))
        return next((cls for cls in found if cls is not Tensor), None)


def _classes_of_states(optimizer: Optimizer, group: dict[str, Any]) -> Iterator[type[Tensor]]:
    clone, param = stepped_once(optimizer, group)
    if clone is not None:
        yield from (type(value) for value in clone.state.get(param, {}).values() if isinstance(value, Tensor))


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


class _Draws(TorchDispatchMode):
    """Notes whether an operation draws random numbers."""

    are_there = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.are_there = True
        return func(*args, **(kwargs or {}))


def _reduces(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    weights = weights_of(group, SHAPE)
    try:
        with _Reductions(weights.numel()) as reductions:
            stepped(optimizer, group, weights, gradients_of(weights, STEPS))
    except Exception:  # see `_differs`
        return False
    return reductions.are_there


def _couples(optimizer: Optimizer, group: dict[str, Any], scale: float) -> bool:
    tensors = [weights_of(group, shape) for shape in (SHAPE, _OTHER_SHAPE)]
    gradients = [[scale * each for each in gradients_of(tensor, MANY_STEPS)] for tensor in tensors]
    try:
        together, settings = run(optimizer, group, tensors, gradients)
        after = torch.get_rng_state()
        torch.manual_seed(0)
        if not torch.equal(torch.get_rng_state(), after):
            return False
        again, _ = run(optimizer, group, tensors, gradients)
        alone = [run(optimizer, group, [each], [its]) for each, its in zip(tensors, gradients, strict=True)]
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
    every = gradients_of(weights, STEPS if type(optimizer).__module__.startswith(UPSTREAM) else MANY_STEPS)
    try:
        whole = stepped(optimizer, group, weights, every)
        again = stepped(optimizer, group, weights, every)
    except Exception:  # a user's class that needs a closure, or more than a gradient
        return False
    way = float((whole - weights).abs().max())
    if not way > 0:
        return False
    if not torch.equal(whole, again):
        return True
    try:
        parts = [
            stepped(optimizer, group, part, gradients)
            for part, *gradients in zip(*(_cut(tensor) for tensor in (weights, *every)), strict=True)
        ]
    except Exception:
        return True
    together = torch.cat([part.flatten() for part in parts])
    return not float((together - whole.flatten()).abs().max()) <= _TOLERANCE * way


def _cut(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """As ZeRO cuts a flattened tensor."""
    return tensor.flatten()[:_FLAT_CUT], tensor.flatten()[_FLAT_CUT:]
