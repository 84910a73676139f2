"""DeepSpeed's Adam for offloaded states, in its own compiled kernel, equals torch's under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import Classifier, loader, relative_error, trainer, weights, zero_plus

pytestmark = [pytest.mark.thorough, pytest.mark.slow]
_LOW = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def _build() -> None:
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)


@pytest.fixture(autouse=True)
def kernel(ranks2: Any) -> None:
    """The compiled kernel, which is built on first use: minutes, if other tests run."""
    ranks2.run(_build, timeout=1200)


class _Module(Classifier):
    """Two groups, of which one decays; DeepSpeed's optimizer, but under DDP."""

    def __init__(self, ours: bool, **more: Any) -> None:
        super().__init__(scheduler=None)
        self.ours, self.more = ours, more

    def configure_optimizers(self) -> Any:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        kind: Any = DeepSpeedCPUAdam if self.ours else torch.optim.AdamW
        params = list(self.parameters())
        groups = [
            {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
            {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
        ]
        return kind(groups, 0.01, eps=1e-3, **self.more)


def _fit(module: _Module, make: Any, folder: str, **options: Any) -> torch.Tensor:
    """A fit that is clipped, saved and resumed."""
    first = trainer(make(), max_epochs=1, gradient_clip_val=0.5, **options)
    first.fit(module, loader())
    path = Path(folder, "one.ckpt")
    first.save_checkpoint(path)
    other = _Module(module.ours, **module.more)
    trainer(make(), max_epochs=2, gradient_clip_val=0.5, **options).fit(other, loader(), ckpt_path=str(path))
    return weights(other).float()


def _against_ddp(stage: int, kwargs: dict[str, Any], precision: str, folder: str) -> float:
    """Against DDP in fp32."""
    more = {"fp32_optimizer_states": False} if "config" in kwargs else {}
    expected = _fit(_Module(False), lambda: "ddp", f"{folder}/ddp")
    module, path = _Module(True, **more), f"{folder}/{stage}-{len(kwargs)}"
    return relative_error(_fit(module, lambda: zero_plus(stage, **kwargs), path, precision=precision), expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_cpu_adam_is_ddps_adamw(ranks2: Any, stage: int, tmp_path: Path) -> None:
    for kwargs in ({}, {"offload": "cpu"})[: 1 if stage == 1 else 2]:
        assert max(ranks2.run(_against_ddp, stage, kwargs, "32-true", str(tmp_path))) <= 1e-5


@pytest.mark.parametrize("stage", [2, 3])
def test_states_of_bf16_that_are_offloaded(ranks2: Any, stage: int, tmp_path: Path) -> None:
    """Against DDP in fp32: weights and moments have 8 bits."""
    kwargs = {"offload": "cpu", "config": {"bf16": _LOW}}
    assert max(ranks2.run(_against_ddp, stage, kwargs, "bf16-true", str(tmp_path))) <= 4e-2
