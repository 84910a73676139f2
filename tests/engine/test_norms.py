"""The norm of gradients, from the norms of their chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zeroplus.engine.families.norms import ReadsGradientsOnce, as_one, chunk_norms

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

    def get_grad_norm_direct(self, gradients: Any, params: Any, norm_type: float = 2) -> list[Tensor]:
        return list(gradients)

    def unscale_and_clip_grads(self, gradients: Tensor, total_norm: Tensor) -> None:
        gradients.div_(self.loss_scale)


class _Optimizer(ReadsGradientsOnce, _Upstream):
    pass


def test_padding_and_other_norms_are_left_to_upstream() -> None:
    padding = torch.ones(5)
    padding._zero_padding = True  # type: ignore[attr-defined]
    gradient = torch.ones(4)
    given = _Optimizer().get_grad_norm_direct((each for each in (gradient, padding)), [])
    assert given[0].tolist() == [2.0]
    assert given[1] is padding
    assert _Optimizer().get_grad_norm_direct([gradient], [], float("inf"))[0] is gradient


def test_gradients_are_unscaled_where_they_are_scaled() -> None:
    optimizer = _Optimizer()
    gradients = torch.full((2,), 8.0)
    version = gradients._version
    optimizer.unscale_and_clip_grads(gradients, torch.ones(()))
    assert gradients._version == version
    optimizer.loss_scale = 4.0
    optimizer.unscale_and_clip_grads(gradients, torch.ones(()))
    assert gradients.tolist() == [2.0, 2.0]
