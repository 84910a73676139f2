"""What a call writes to, by the schema of an operator or by the name of a function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zeroplus.fsdp.whole import rules


@torch.library.custom_op("zeroplus_rules::swap", mutates_args=("first", "second"))
def _swap(scale: float, first: Tensor, other: Tensor, second: Tensor) -> None:
    """Write two of its arguments."""


_A, _B, _C = (torch.ones(2) for _ in range(3))
CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = {
    "an operator": (torch.ops.zeroplus_rules.swap, (0.5, _A, _B, _C), {}, [_A, _C]),
    "its overload, by name": (torch.ops.zeroplus_rules.swap.default, (0.5, _A), {"other": _B, "second": _C}, [_A, _C]),
    "an overload of torch": (torch.ops.aten.mul_.Tensor, (_A, _B), {}, [_A]),
    "all of its overloads": (torch.ops.aten.mul_, (_A, _B), {}, [_A]),
    "one that only reads": (torch.ops.aten.mul.Tensor, (_A, _B), {}, []),
    "a result that is given": (torch.ops.aten.mul.out, (_A, _B), {"out": _C}, [_C]),
    "a list": (torch.ops.aten._foreach_mul_.Scalar, ([_A, _B], 2.0), {}, [_A, _B]),
    "a method": (Tensor.add_, (_A, _B), {}, [_A]),
    "an operator of Python": (Tensor.__iadd__, (_A, _B), {}, [_A]),
    "a conversion": (Tensor.__int__, (_A,), {}, []),
    "requires_grad_": (Tensor.requires_grad_, (_A,), {}, []),
    "out=": (torch.mul, (_A, _B), {"out": _C}, [_C]),
    "an initializer": (torch.nn.init.zeros_, (), {"tensor": _A}, [_A]),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_written(name: str) -> None:
    function, args, kwargs, want = CALLS[name]
    found = rules.written(function, args, kwargs)
    assert [id(each) for each in found] == [id(each) for each in want]


def test_names() -> None:
    assert rules.name_of(torch.ops.aten.mul_.Tensor) == rules.name_of(torch.ops.aten.mul_) == "mul_"
    assert rules.name_of(torch.ops.zeroplus_rules.swap) == "zeroplus_rules::swap"  # which may be called like torch's
    assert rules.name_of(torch.linalg.vector_norm) == "vector_norm"
