"""Master weights that follow the module's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zeroplus.engine.families.masters import _AT_ONCE_ON_DEVICE, Homes, share_memory, take_over
from lightning_zeroplus.plan.zero import COMPARED_AT_ONCE


def test_masters_of_the_same_dtype_are_the_weights() -> None:
    weights, master = torch.arange(6.0), torch.zeros(6, requires_grad=True)
    assert share_memory(master, weights)
    weights[2] = 7
    assert master[2] == 7 and master.requires_grad and master.is_leaf
    assert not share_memory(torch.zeros(6), weights.bfloat16())
    assert not share_memory(torch.zeros(5), weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_what_was_written_is_taken_over(dtype: torch.dtype) -> None:
    master = torch.tensor([1.0001, 2.0002, -3.0003, 4.0004])
    weights = master.to(dtype)
    weights[1], weights[3] = 5.0, -6.0
    take_over(master, weights)
    assert master.tolist() == [pytest.approx(1.0001, abs=1e-7), 5.0, pytest.approx(-3.0003, abs=1e-7), -6.0]
    before = master.clone()
    take_over(master, master.to(dtype))
    assert torch.equal(master, before)


class _Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not func.is_view and made is not args[0]:
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("layout", ["flat", "transposed"])
def test_many_weights_are_compared_in_parts(layout: str) -> None:
    master = torch.linspace(-1, 1, 3 * 2**16 + 2)
    master = master if layout == "flat" else master.view(2, -1).T
    weights = master.bfloat16()
    weights[-1] = 7.0
    before = master.clone()
    with _Largest() as largest:
        take_over(master, weights)
    assert torch.equal(master[:-1], before[:-1])
    assert (master[-1] == 7).all()
    assert layout != "flat" or 0 < largest.elements <= 2**16


def test_the_plan_counts_the_parts() -> None:
    assert COMPARED_AT_ONCE == _AT_ONCE_ON_DEVICE


def test_what_is_assigned_to_data_moves_into_the_buffer() -> None:
    flat = torch.zeros(6)
    params = [nn.Parameter(flat[:4].view(2, 2)), nn.Parameter(flat[4:])]
    homes = Homes(params, ["weight", "bias"])
    params[0].data = torch.ones(2, 2)
    homes.bring_back()
    assert flat.tolist() == [1, 1, 1, 1, 0, 0]
    with torch.no_grad():
        params[0].mul_(2)
    assert flat.tolist() == [2, 2, 2, 2, 0, 0]
    params[1].data = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"'bias' was assigned a torch.float32 tensor of shape \(3,\)"):
        homes.bring_back()
