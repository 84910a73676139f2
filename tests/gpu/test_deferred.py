"""The example on one GPU: the same losses with and without local_sums, within what a GPU's atomics leave open."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.commands.test_examples import _run


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_deferral_trains_alike_on_one_gpu(tmp_path: Path, precision: str) -> None:
    arguments = ("--accelerator=cuda", "--devices=1", f"--precision={precision}", "--steps=30")
    deferred = _run("deferred_moe.py", tmp_path, "deferred", *arguments)
    plain = _run("deferred_moe.py", tmp_path, "plain", *arguments, "--no-defer")
    bound = 1e-4 if precision == "32-true" else 2e-2
    assert deferred["loss"] == pytest.approx(plain["loss"], rel=bound)
    assert deferred["loss"][-1] < 0.7 * deferred["loss"][0]
    for name in ("peak_mib", "seconds_per_step"):
        print(f"{name}: deferred {deferred[name]:.3f}, plain {plain[name]:.3f}")
