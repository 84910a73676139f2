"""Tensors that stand for a parameter, and modules that list some of their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zeroplus.engine.optimizer.elementwise import knows_identities, knows_parameters
from lightning_zeroplus.weights.listed import check_registered, list_all, list_some
from lightning_zeroplus.weights.partitioned.alike import stand_for


class _Own(nn.Parameter):
    pass


def test_a_tensor_has_the_class_and_the_attributes_of_its_parameter() -> None:
    param: Any = _Own(torch.zeros(3))
    param.ball, param.ds_id = 1.0, 7
    tensor: Any = stand_for(torch.ones(3, requires_grad=True), param)
    assert isinstance(tensor, _Own) and type(tensor + 1) is torch.Tensor
    param.ball = 2.0
    assert tensor.ball == 2.0 and not hasattr(tensor, "ds_id") and not hasattr(tensor, "other")


class _Asks(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(getattr(param, "factor", 1.0))
        return super().step(closure)


def test_an_optimizer_looks_at_what_it_asks_for() -> None:
    class Sub(torch.optim.SGD):
        pass

    plain: Any = nn.Parameter(torch.zeros(3, 2))
    assert not knows_parameters(_Asks([plain], 0.1))
    plain.other = 1
    assert not knows_parameters(_Asks([plain], 0.1))
    plain.factor = 0.5
    assert knows_parameters(_Asks([plain], 0.1)) and not knows_parameters(Sub([plain], 0.1))
    own = _Own(torch.zeros(3, 2))
    assert knows_parameters(Sub([own], 0.1)) and not knows_parameters(torch.optim.SGD([own], 0.1))


@pytest.mark.parametrize("kept", ["id", "key", "in a group", "none"])
def test_an_optimizer_knows_identities(kept: str) -> None:
    param = nn.Parameter(torch.zeros(3))
    optimizer: Any = _Asks([param], 0.1)
    if kept == "in a group":
        optimizer.param_groups[0]["special"] = [{"ids": {id(param)}}]
    optimizer.known = {"id": [id(param), 3], "key": {param: 1.0}, "none": [1, "a", {2: None}]}.get(kept)
    assert knows_identities(optimizer) == (kept != "none")


class _ListsSome(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.trunk = nn.Linear(2, 2), nn.Linear(2, 2)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.head.parameters(recurse)


def test_a_module_lists_what_its_user_has_written_and_an_optimizer_must_have_what_is_registered() -> None:
    module = _ListsSome()
    list_all(module)
    assert len(list(module.parameters())) == 2 and len(list(module.named_parameters())) == 4
    check_registered(module, [torch.optim.SGD(module.trunk.parameters(), 0.1)])
    with pytest.raises(ValueError, match=r"shape \(5,\).*none of the module's"):
        check_registered(module, [torch.optim.SGD([nn.Parameter(torch.zeros(5))], 0.1)])
    list_some(module)
    assert not {"parameters", "named_parameters"} & vars(module).keys()
