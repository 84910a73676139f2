"""``32-true`` changes no dtype; 16-bit precisions convert real floating-point tensors only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_zeroplus as zp
from tests.matrix.cells import pretend_fp16_kernels
from tests.support.training import Classifier, loader, trainer, zero_plus


class _Buffers(nn.Module):
    """Buffers of every kind that users have: rotary frequencies, float64 constants, quantized weights, masks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.polar(torch.ones(8), torch.arange(8.0)))
        self.register_buffer("constants", torch.arange(16, dtype=torch.float64) / 7)
        self.register_buffer("quantized", torch.arange(16, dtype=torch.int8))
        self.register_buffer("mask", torch.arange(16) % 3 > 0)

    def forward(self, x: Tensor) -> Tensor:
        rotated = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (8, 2))) * self.frequencies).flatten(-2)
        return ((rotated * self.constants).float() + x * self.quantized) * self.mask


class _Weight(nn.Module):
    def __init__(self, weight: Tensor, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.is_complex():
            return torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (8, 2))) * self.weight).flatten(-2)
        return (x.to(self.weight.dtype) * self.weight).to(x.dtype)


class _Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 2, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(16, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.view(-1, 4, 2, 2))[:, :, :2, :2].flatten(1)
        return x @ self.transposed.t() @ self.transposed


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "buffers": _Buffers,
    "frozen complex": lambda: _Weight(torch.polar(torch.ones(8), torch.arange(8.0)), False),
    "frozen float64": lambda: _Weight(torch.arange(16, dtype=torch.float64) / 7, False),
    "frozen bfloat16": lambda: _Weight(torch.arange(16).bfloat16() / 7, False),
    "channels last": _Images,
    "complex": lambda: _Weight(torch.polar(torch.ones(8), torch.arange(8.0)), True),
    "float64": lambda: _Weight(torch.arange(16, dtype=torch.float64) / 7, True),
    "bfloat16": lambda: _Weight(torch.arange(16).bfloat16() / 7, True),
    "batch norm": lambda: nn.BatchNorm1d(16),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, affine=True, track_running_stats=True), nn.Flatten()
    ),
}
RIGHT = ["buffers", "frozen complex", "frozen float64", "frozen bfloat16", "channels last"]
TRAINED = ["complex", "float64", "bfloat16"]


class _Layered(Classifier):
    def __init__(self, layer: str, sharded_init: bool = False) -> None:
        self.layer = layer
        super().__init__(scheduler=None, sharded_init=sharded_init)

    def build(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), LAYERS[self.layer](), nn.ReLU(), nn.Linear(16, 4))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], 1e-2, eps=1e-3)


def _state(module: Classifier) -> dict[str, Tensor]:
    params = [param for param in module.net.parameters() if hasattr(param, "ds_id")]
    if not params:
        return {name: value.detach().clone() for name, value in module.net.state_dict().items()}
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters(params):
        return {name: value.detach().clone() for name, value in module.net.state_dict().items()}


def _fit(strategy: Any, module: Classifier, precision: Any) -> tuple[dict[str, Tensor], float]:
    run = trainer(strategy, precision=precision, max_epochs=1, limit_train_batches=4)
    run.fit(module, loader(), loader(64))
    return _state(module), float(run.callback_metrics["val_loss"])


def _difference(got: Tensor, want: Tensor) -> float:
    wide = torch.complex128 if want.is_complex() else torch.float64
    return float((got.to(wide) - want.to(wide)).abs().max() / want.to(wide).abs().max().clamp(min=1))


def _compare(layers: list[str], stages: list[int], sharded_init: bool, precision: str = "32-true") -> dict[str, Any]:
    """Of each layer and stage: dtypes that differ from DDP's, the largest error, how far DDP has moved the weights."""
    if precision.startswith("16"):
        pretend_fp16_kernels()
    found = {}
    for layer in layers:
        start = _Layered(layer).net.state_dict()
        want, loss = _fit("ddp", _Layered(layer), precision.replace("16-mixed", "32-true").replace("bf32", "32"))
        for stage in stages:
            fp16 = {"fp16": {"loss_scale": 128}} if precision.startswith("16") else {}
            got, other = _fit(zero_plus(stage, fp16), _Layered(layer, sharded_init), precision)
            found[f"{layer} {stage}"] = (
                [name for name in want if got[name].dtype != want[name].dtype and not name.endswith(("weight", "bias"))]
                if precision != "32-true"
                else [name for name in want if got[name].dtype != want[name].dtype],
                max(abs(loss - other), *(_difference(got[name], want[name]) for name in want)),
                max(_difference(start[name], want[name]) for name in want),
            )
    return found


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("sharded_init", [False, True])
def test_32_true_changes_no_dtype(ranks2: Any, sharded_init: bool) -> None:
    stages = [3] if sharded_init else [0, 1, 2, 3]
    for found in ranks2.run(_compare, RIGHT, stages, sharded_init):
        assert len(found) == len(RIGHT) * len(stages)
        for name, (dtypes, error, moved) in found.items():
            assert not dtypes and error <= 1e-6 < 1e-3 < moved, (name, dtypes, error, moved)


def test_stage_0_trains_every_dtype(ranks2: Any) -> None:
    for found in ranks2.run(_compare, TRAINED, [0], False):
        for name, (dtypes, error, moved) in found.items():
            assert not dtypes and error <= 1e-6 < 1e-3 < moved, (name, dtypes, error, moved)


def _refusals(stage: int, precision: Any) -> dict[str, str]:
    found = {}
    for layer in TRAINED:
        try:
            _fit(zero_plus(stage), _Layered(layer), precision)
            found[layer] = ""
        except ValueError as error:
            found[layer] = str(error)
    return found


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_partitions_cannot_train_every_dtype(ranks2: Any, stage: int) -> None:
    """A flat partition would drop an imaginary part, or precision; or train bf16 otherwise than DDP does."""
    for found in ranks2.run(_refusals, stage, "32-true"):
        for layer, message in found.items():
            assert "'net.1.weight'" in message and f"torch.{layer[:7]}" in message and "Use stage 0" in message
    for found in ranks2.run(_refusals, stage, "bf16-true"):
        assert "view_as_real" in found["complex"] and not found["float64"] and not found["bfloat16"]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_statistics_stay_in_fp32_under_mixed_precision(ranks2: Any, precision: str) -> None:
    """The reference is fp32: 4 steps of Adam move a weight by 4e-2, and roundings to 8 bits by less than half of it."""
    for found in ranks2.run(_compare, ["batch norm", "instance norm"], [0, 1, 2, 3], False, precision):
        assert len(found) == 8
        for name, (dtypes, error, moved) in found.items():
            assert not dtypes and error <= 2e-2 < 4e-2 < moved, (name, dtypes, error, moved)


def test_what_16_bits_convert() -> None:
    tensors = {
        "narrow": torch.ones(2),
        "wide": torch.ones(2, dtype=torch.float64),
        "complex": torch.full((2,), 1j),
        "count": torch.ones(2, dtype=torch.int64),
        "mask": torch.ones(2, dtype=torch.bool),
    }
    for name in ("bf16-true", "bf16-mixed", "16-true", "16-mixed", "32-true"):
        plugin = zp.ZeroPlusPrecision(name)
        low = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(name)
        batch = plugin.convert_input(tensors)
        module = nn.Module()
        for key, value in tensors.items():
            module.register_buffer(key, value.clone())
        module.weight, module.phase = nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), 1j))
        module = plugin.convert_module(module)
        for key, value in tensors.items():
            wanted = low if low is not None and value.is_floating_point() else value.dtype
            assert batch[key].dtype == module.get_buffer(key).dtype == wanted
        assert module.phase.imag.eq(1).all()
        assert module.weight.dtype == (low or torch.float32)
        with plugin.module_init_context():
            assert torch.get_default_dtype() == (low or torch.float32)
