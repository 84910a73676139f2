"""The names that a module saves its parameters by, where they are not their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, checkpoint_wrapper

from lightning_zeroplus.checkpoint.hooked import saved_names
from lightning_zeroplus.engine.upstream.sharded_init import _wrappers_without_mark

_WRAPPED = "_checkpoint_wrapped_module."


def test_most_modules_save_by_their_own_names() -> None:
    assert saved_names(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) == {}


def test_wrappers_take_their_own_name_out() -> None:
    net = nn.Sequential(checkpoint_wrapper(nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))), nn.Linear(2, 2))
    assert saved_names(net) == {
        f"0.{_WRAPPED}0.{_WRAPPED}weight": "0.0.weight",
        f"0.{_WRAPPED}0.{_WRAPPED}bias": "0.0.bias",
    }


def test_each_name_of_a_tied_parameter_has_its_own() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    net = nn.Sequential(checkpoint_wrapper(first), second)
    assert saved_names(net) == {f"0.{_WRAPPED}weight": "0.weight"}


def _renames(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    state[f"{prefix}earlier"] = state.pop(f"{prefix}weight")


def _drops(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    del state[f"{prefix}weight"]


def _copies(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    state[f"{prefix}again"] = state[f"{prefix}weight"]


def _changes(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    state[f"{prefix}half"] = state.pop(f"{prefix}weight").half()


def test_only_what_a_hook_renames_has_another_name() -> None:
    for hook, found in ((_renames, {"0.weight": "0.earlier"}), (_drops, {}), (_copies, {}), (_changes, {})):
        net = nn.Sequential(nn.Linear(2, 2))
        net[0].register_state_dict_post_hook(hook)
        assert saved_names(net) == found, hook.__name__


class _SavesItself(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}matrix"] = self.weight if keep_vars else self.weight.detach()


def test_a_part_may_save_itself() -> None:
    assert saved_names(nn.Sequential(_SavesItself(2, 2, bias=False))) == {"0.weight": "0.matrix"}


def test_wrappers_do_not_look_for_a_mark_in_what_they_wrap() -> None:
    get = vars(ActivationWrapper)["__getattr__"]
    made = checkpoint_wrapper(nn.Linear(2, 2))
    made._checkpoint_wrapped_module._ds_child_entered = True
    assert hasattr(made, "_ds_child_entered")
    with _wrappers_without_mark():
        assert not hasattr(made, "_ds_child_entered")
        assert torch.is_tensor(made.weight)
    assert vars(ActivationWrapper)["__getattr__"] is get
