"""The norm of gradients, from the norms of their chunks."""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

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

    def scaled_global_norm(self, norm_type: float = 2) -> str:
        return "upstream's"

    def _get_norm_groups(self) -> str:
        return "upstream's"

    def unscale_and_clip_grads(self, gradients: Tensor, total_norm: Tensor) -> None:
        gradients.div_(self.loss_scale)


class _Optimizer(ReadsGradientsOnce, _Upstream):
    def __init__(self, *groups: list[Tensor]) -> None:
        self.averaged_gradients = dict(enumerate(groups))
        self.bit16_groups = self.fp16_groups = list(groups)


def _norms(last: float) -> list[float]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed.init_distributed("gloo", verbose=False)
    padding = torch.ones(5)
    padding._zero_padding = True  # type: ignore[attr-defined]
    rank = torch.distributed.get_rank()
    optimizer = _Optimizer([torch.full((4,), 1.0 + rank), padding], [torch.tensor([[last if rank else 4.0]])])
    norms = [optimizer.scaled_global_norm(), global_norm([torch.full((4,), 1.0 + rank)] if rank else [], None)]
    del optimizer.averaged_gradients[0][1]  # stage 3 pads with zeros, in the gradients
    (of_stage_3,) = optimizer._get_norm_groups()
    assert all(norm.device.type == "cpu" and norm.dtype == torch.float32 for norm in [*norms, of_stage_3])
    return [*map(float, norms), float(of_stage_3)]


def test_one_norm_of_all_groups_and_ranks(ranks2: Any) -> None:
    # 4 * 1 + 4 * 4 on the ranks, and 16 + 64 in the other group; the second norm is of the second rank alone.
    assert ranks2.run(_norms, 8.0) == [[10.0, 4.0, 10.0]] * 2
    for last in (float("inf"), float("nan")):
        assert ranks2.run(_norms, last) == [[float("inf"), 4.0, float("inf")]] * 2


def test_what_upstream_knows_better_is_left_to_it() -> None:
    optimizer: Any = _Optimizer([torch.ones(4)])
    assert optimizer.scaled_global_norm(float("inf")) == "upstream's"
    for name in ("cpu_offload", "has_moe_layers", "use_muon"):
        optimizer = _Optimizer([torch.ones(4)])
        setattr(optimizer, name, True)
        assert optimizer.scaled_global_norm() == "upstream's"
    for name in ("offload_optimizer", "use_muon"):
        optimizer = _Optimizer([torch.ones(4)])
        setattr(optimizer, name, True)
        assert optimizer._get_norm_groups() == "upstream's"


def test_gradients_are_unscaled_where_they_are_scaled() -> None:
    optimizer = _Optimizer()
    gradients = torch.full((2,), 8.0)
    version = gradients._version
    optimizer.unscale_and_clip_grads(gradients, torch.ones(()))
    assert gradients._version == version
    optimizer.loss_scale = 4.0
    optimizer.unscale_and_clip_grads(gradients, torch.ones(()))
    assert gradients.tolist() == [2.0, 2.0]


def test_small_gradients_at_once_have_the_same_norms() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((3,), (40, 50), (4097,), (0,), (1000,), (100, 41), (4095,))
    gradients = [torch.randn(size, generator=generator) for size in sizes]
    gradients += [gradients[0].half(), gradients[0].double()]
    for norms, gradient in zip(_all_chunk_norms(gradients), gradients, strict=True):
        assert torch.equal(norms, chunk_norms(gradient))
