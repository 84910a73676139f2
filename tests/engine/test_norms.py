"""The norm of gradients, from the norms of their chunks."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
from torch import Tensor

from lightning_zeroplus.engine.families import norms as norms_module
from lightning_zeroplus.engine.families.norms import (
    ReadsGradientsOnce,
    _all_chunk_norms,
    as_one,
    chunk_norms,
    global_norm,
)

SIZES = (1, 7, 4096, 4097, 3_000_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_norms_of_chunks(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
    gradients.append(torch.full((300, 300), 1000.0, dtype=dtype))  # in fp16 the norm itself would be infinite
    for gradient in gradients:
        norms = chunk_norms(gradient)
        exact = gradient.double().norm()
        assert norms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert abs(norms.double().norm() / exact - 1) < 1e-6  # 512 additions in fp32


def test_what_is_no_number_stays_none() -> None:
    assert chunk_norms(torch.tensor([1.0, float("nan")])).isnan().all()
    assert chunk_norms(torch.tensor([1.0, float("inf")])).isinf().all()
    assert chunk_norms(torch.empty(0)).tolist() == [0.0]


def test_neighbours_are_one() -> None:
    flat = torch.arange(10.0)
    first, second, third = flat.narrow(0, 2, 3), flat.narrow(0, 5, 1), flat.narrow(0, 6, 4)
    one = as_one([first, second, third])
    assert one is not None
    assert torch.equal(one, flat[2:])
    assert one.data_ptr() == first.data_ptr()
    assert as_one([first]) is not None
    assert as_one([first, third]) is None
    assert as_one([second, first]) is None
    assert as_one([first, torch.ones(1)]) is None
    assert as_one([first, torch.arange(10.0).narrow(0, 5, 1)]) is None


class _Upstream:
    """What upstream's optimizers do, as far as the overrides are concerned."""

    loss_scale = 1.0
    clip_grad = 0.0
    cpu_offload = offload_optimizer = has_moe_layers = False
    dp_process_group = None
    of_groups = (3.0, 4.0)

    def scaled_global_norm(self, norm_type: float = 2) -> Tensor:
        return torch.tensor(7.0)

    def _get_norm_groups(self) -> list[Tensor]:
        return [torch.tensor(each) for each in self.of_groups]

    def has_overflow(self, partition_gradients: bool = True) -> str:
        return "upstream's"

    def unscale_and_clip_grads(self, gradients: Tensor, total_norm: Tensor) -> None:
        gradients.div_(self.loss_scale)


class _Optimizer(ReadsGradientsOnce, _Upstream):
    def __init__(self, *groups: list[Tensor], skips_steps: bool = True, stage: int = 2) -> None:
        engine = SimpleNamespace(skips_steps=lambda: skips_steps)
        self.gradient_accumulation = SimpleNamespace(engine=engine)
        self.averaged_gradients = dict(enumerate(groups))
        setattr(self, "fp16_groups" if stage == 3 else "bit16_groups", list(groups))


def _norms(last: float) -> list[float]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed.init_distributed("gloo", verbose=False)
    padding = torch.ones(5)
    padding._zero_padding = True  # type: ignore[attr-defined]
    rank = torch.distributed.get_rank()
    optimizer = _Optimizer([torch.full((4,), 1.0 + rank), padding], [torch.tensor([[last if rank else 4.0]])])
    norms = [optimizer.scaled_global_norm(), global_norm([torch.full((4,), 1.0 + rank)] if rank else [], None)]
    # Stage 3 pads with zeros, in the gradients.
    (of_stage_3,) = _Optimizer(*map(_without_padding, optimizer.bit16_groups), stage=3)._get_norm_groups()
    assert all(norm.device.type == "cpu" and norm.dtype == torch.float32 for norm in [*norms, of_stage_3])
    unseen = _Optimizer(*optimizer.bit16_groups, skips_steps=False)
    assert unseen.scaled_global_norm() == 0 and unseen.norm_of_step is not None
    return [*map(float, norms), float(of_stage_3), float(unseen.norm_of_step)]


def _without_padding(group: list[Tensor]) -> list[Tensor]:
    return [each for each in group if not hasattr(each, "_zero_padding")]


def test_one_norm_of_all_groups_and_ranks(ranks2: Any) -> None:
    # 4 * 1 + 4 * 4 on the ranks, and 16 + 64 in the other group; the second norm is of the second rank alone.
    assert ranks2.run(_norms, 8.0) == [[10.0, 4.0, 10.0, 10.0]] * 2
    for last in (float("inf"), float("nan")):
        # A comparison of texts, since NaN is not equal to itself.
        assert str(ranks2.run(_norms, last)) == str([[last, 4.0, last, last]] * 2)


def _overflows(last: float) -> tuple[list[bool], list[float], list[int]]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed.init_distributed("gloo", verbose=False)
    gradient = torch.full((4,), last) if torch.distributed.get_rank() else torch.tensor([1.0, 2.0, 2.0])
    optimizer = _Optimizer([gradient])
    with patch.object(norms_module, "global_norm", side_effect=global_norm) as asked:
        found, read, calls = [optimizer.has_overflow()], [], [asked.call_count]
        for _ in range(2):
            read.append(float(optimizer.scaled_global_norm()))
            calls.append(asked.call_count)
        found.append(optimizer.has_overflow())
        gradient.fill_(float("inf"))
        found.append(optimizer.has_overflow())
    return found, read, calls


def test_the_norm_says_whether_a_gradient_overflows(ranks2: Any) -> None:
    # The norm of a finite gradient is kept for the step, once. The ranks' norms are 3 and 4.
    assert ranks2.run(_overflows, 2.0) == [([False, False, True], [5.0] * 2, [1, 1, 2])] * 2
    for last in (float("inf"), float("nan")):
        assert str(ranks2.run(_overflows, last)) == str([([True, True, True], [last] * 2, [1, 2, 3])] * 2)


@pytest.mark.parametrize("skips_steps", [True, False])
def test_what_upstream_knows_better_is_left_to_it(skips_steps: bool) -> None:
    optimizer: Any = _Optimizer([torch.ones(4)])
    assert optimizer.scaled_global_norm(float("inf")) == 7
    for name in ("cpu_offload", "has_moe_layers", "use_muon"):
        optimizer = _Optimizer([torch.ones(4)], skips_steps=skips_steps)
        setattr(optimizer, name, True)
        assert optimizer.scaled_global_norm() == (7 if skips_steps else 0)
        assert optimizer.norm_of_step == 7
        assert optimizer.has_overflow() is True
    for name in ("offload_optimizer", "use_muon"):
        optimizer = _Optimizer([torch.ones(4)], skips_steps=skips_steps, stage=3)
        setattr(optimizer, name, True)
        assert optimizer._get_norm_groups() == [5 if skips_steps else 0]
        assert optimizer.norm_of_step == 5


def test_gradients_are_unscaled_where_they_are_scaled() -> None:
    optimizer = _Optimizer()
    gradients = torch.full((2,), 8.0)
    version = gradients._version
    optimizer.unscale_and_clip_grads(gradients, torch.ones(()))
    assert gradients._version == version
    optimizer.loss_scale = 4.0
    optimizer.unscale_and_clip_grads(gradients, torch.ones(()))
    assert gradients.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("norm", [0.25, 4.0, math.inf, math.nan])
def test_clips_as_torch_does_where_upstream_has_not_seen_the_norm(norm: float) -> None:
    expected, read = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    expected.grad, read.grad = (torch.tensor([norm, 0.0, 0.0]) for _ in range(2))
    torch.nn.utils.clip_grad_norm_([expected], 0.5)
    for stage, gradients in [(2, [read.grad]), (2, [[read.grad.clone()]]), (3, 0)]:
        optimizer: Any = _Optimizer(skips_steps=False, stage=stage)
        optimizer.norm_of_step, optimizer.clip_grad = torch.tensor(norm), 0.5
        flat = torch.nn.Parameter(torch.zeros(3))
        flat.grad = torch.tensor([norm, 0.0, 0.0])
        optimizer.fp32_partitioned_groups_flat = [flat]
        optimizer.unscale_and_clip_grads(gradients, torch.zeros(()))
        clipped = gradients[0] if stage == 2 else flat.grad
        torch.testing.assert_close(torch.stack([*clipped]).view(-1), expected.grad, rtol=0, atol=0, equal_nan=True)


def test_small_gradients_at_once_have_the_same_norms() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((3,), (40, 50), (4097,), (0,), (1000,), (100, 41), (4095,))
    gradients = [torch.randn(size, generator=generator) for size in sizes]
    gradients += [gradients[0].half(), gradients[0].double()]
    for norms, gradient in zip(_all_chunk_norms(gradients), gradients, strict=True):
        assert torch.equal(norms, chunk_norms(gradient))
