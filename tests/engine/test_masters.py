"""Master weights that follow the module's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zeroplus.engine.families.masters import Homes, share_memory, take_over


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
