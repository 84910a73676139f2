"""examples/deferred_moe.py: with deferral the losses are those without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.test_examples import _run


@pytest.mark.slow
def test_losses_with_and_without_deferral_agree(tmp_path: Path) -> None:
    deferred = _run("deferred_moe.py", tmp_path, "deferred", "--steps=24")["loss"]
    plain = _run("deferred_moe.py", tmp_path, "plain", "--steps=24", "--no-defer")["loss"]
    assert len(deferred) == len(plain) == 24 and deferred[-1] < 0.6 * deferred[0]
    assert deferred == plain
