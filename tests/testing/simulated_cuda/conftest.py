"""Two ranks with the simulated device, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_zeroplus.testing import RankPool
from lightning_zeroplus.testing.simulated_cuda import why_unavailable
from tests.conftest import Ranks, settle


@pytest.fixture(scope="session")
def cuda_ranks() -> Iterator[RankPool]:
    """``cuda:0`` and ``cuda:1``, with NCCL's rules."""
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    with Ranks(2, timeout=120, initializer=settle, device="simulated_cuda") as pool:
        yield pool
