from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_zeroplus.testing.streams.dispatch import Accesses, AccessMode


def touched(operation: Callable[..., object], **tensors: Tensor) -> list[tuple[str, set[str], set[str], int]]:
    """Per operator: its name, which of the tensors it reads and writes, and how many storages are new."""
    calls: list[tuple[str, set[str], set[str], int]] = []
    names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}

    def report(operator: str, accesses: Accesses) -> None:
        reads, writes = (
            {names.get(tensor.untyped_storage()._cdata, "new") for tensor in accessed} for accessed in accesses[:2]
        )
        calls.append((operator.removeprefix("aten::"), reads, writes, len(accesses.fresh)))

    with AccessMode(report):
        operation(**tensors)
    return calls


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda a, b: a + b, [("add", {"a", "b"}, {"new"}, 1)]),
        (lambda a, b: a.add_(b), [("add_", {"b"}, {"a"}, 0)]),
        (lambda a, b: a.copy_(b), [("copy_", {"b"}, {"a"}, 0)]),
        (lambda a, b: torch.mul(a, 2, out=b), [("mul", {"a"}, {"b"}, 0)]),
        (lambda a, b: a.view(2, 2).t()[0].detach(), []),
        (lambda a, b: torch.ops.aten._unsafe_view(a, [2, 2]), []),
        (lambda a, b: a.new_empty(3), [("new_empty", set(), set(), 1)]),
        (lambda a, b: torch.zeros_like(a), [("zeros_like", set(), {"new"}, 1)]),
        (lambda a, b: torch._foreach_add_([a], [b]), [("_foreach_add_", {"b"}, {"a"}, 0)]),
        (lambda a, b: a[:2].fill_(0), [("fill_", set(), {"a"}, 0)]),
        (lambda a, b: torch.cat([a, b]), [("cat", {"a", "b"}, {"new"}, 1)]),
        (lambda a, b: a.max(0), [("max", {"a"}, {"new"}, 2)]),
        (lambda a, b: a.sum().item(), [("sum", {"a"}, {"new"}, 1), ("_local_scalar_dense", {"new"}, set(), 0)]),
    ],
)
def test_what_operators_touch(operation, expected) -> None:
    assert touched(operation, a=torch.ones(4), b=torch.ones(4)) == expected
