"""Two ranks on real GPUs, started once. Each test here is skipped where torch sees none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_zeroplus.testing import RankPool
from tests.conftest import Ranks, quiet

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[RankPool]:
    """Two ranks with NCCL, each with a GPU, or both with the same one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with Ranks(2, timeout=120, initializer=quiet, device="cuda") as pool:
        yield pool
