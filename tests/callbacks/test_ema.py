"""EMA: arguments, refusals, warnings, what it adds to training. Programs of the family ``averages`` show its values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file
from torch import Tensor
from torch.autograd.profiler import profile

import lightning_zeroplus as zp
from lightning_zeroplus.testing import RankPool
from tests.checkpoint import model
from tests.matrix.cells import pretend_fp16_kernels

_QUIET: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
_QUIET |= {"enable_model_summary": False, "limit_val_batches": 2, "max_epochs": 1, "limit_train_batches": 3}


def _trainer(folder: Path, *callbacks: Any) -> Trainer:
    return Trainer(callbacks=list(callbacks), default_root_dir=folder, enable_checkpointing=False, **_QUIET)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"decay": 1.5}, r"decay=1.5\): give a number from 0 to 1"),
        ({"decay": True}, r"decay=True"),
        ({"decay": 0.9, "every_n_steps": 0}, r"every_n_steps=0\): give a positive integer"),
        ({"decay": 0.9, "warmup": -1}, r"warmup=-1\): give a number of at least 0"),
        ({"decay": 0.9, "warmup": None}, r"warmup=None"),
    ],
)
def test_refuses_arguments(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r"zp.EMA\(" + says):
        zp.EMA(**arguments)


def test_refuses_a_strategy_whose_shards_it_does_not_know(tmp_path: Path) -> None:
    class Unknown(FSDPStrategy):
        """Lightning's own FSDP has flat parameters."""

    trainer = _trainer(tmp_path, zp.EMA(0.9))
    with (
        patch.object(type(trainer), "strategy", Unknown()),
        pytest.raises(MisconfigurationException, match="`Unknown`"),
    ):
        trainer.callbacks[0].setup(trainer, BoringModel(), "fit")  # type: ignore[attr-defined]


def test_says_that_a_test_uses_the_weights(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, zp.EMA(0.9))
    for run in (trainer.validate, trainer.test):
        with pytest.warns(UserWarning, match=f"`trainer.{run.__name__}` uses the weights, .*export"):
            run(BoringModel(), verbose=False)


def test_a_checkpoint_without_the_average_is_not_resumed(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, zp.EMA(0.9))
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=False)
    del saved["zeroplus_ema"]
    torch.save(saved, tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match="has the state of an `EMA`, and no average"):
        resumed = _trainer(tmp_path, zp.EMA(0.9))
        resumed.fit_loop.max_epochs = 2
        resumed.fit(BoringModel(), ckpt_path=tmp_path / "one.ckpt")


def test_counts_updates(tmp_path: Path) -> None:
    average = zp.EMA(0.9, every_n_steps=2)
    trainer = _trainer(tmp_path, average)
    trainer.fit(BoringModel())
    assert (trainer.global_step, average.updates) == (3, 1)


# -- on ranks -------------------------------------------------------------------------------------------------------

_KINDS = (0, 1, 2, 3, "fsdp")


class _Plain(model.Tied):
    def on_train_start(self) -> None:
        pass


def _fit(kind: int | str, steps: int, *callbacks: Callback, path: str | None = None, **kwargs: Any) -> Trainer:
    strategy: Any = zp.ZeroPlusFSDPStrategy() if kind == "fsdp" else model.strategy(int(kind))
    run = model.trainer(strategy, max_steps=steps, callbacks=list(callbacks), **kwargs)
    run.fit(_Plain(), model.loader(), ckpt_path=path)
    return run


def _collectives(kind: int | str) -> list[Counter[str]]:
    """Those of a fit, as torch's dispatcher sees them: without `EMA`, and with it."""
    found = []
    for callbacks in ([], [zp.EMA(0.9)]):
        with profile(use_kineto=False) as seen:  # Kineto takes seconds to start
            _fit(kind, 3, *callbacks)
        found.append(Counter(each.name for each in seen.function_events if each.name.startswith("c10d::")))
    return found


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kind", _KINDS)
def test_training_has_no_collective_more(ranks2: Any, kind: int | str) -> None:
    for without, with_it in ranks2.run(_collectives, kind):
        assert with_it == without and without.total() >= 3


def _halfway(folder: str) -> None:
    """Save the averages after two steps, and after four without interruption."""
    for kind in _KINDS:
        _fit(kind, 2, zp.EMA(0.8)).save_checkpoint(f"{folder}/{kind}-2")
        _fit(kind, 4, zp.EMA(0.8)).save_checkpoint(f"{folder}/{kind}-4")


@pytest.fixture(scope="module")
def halfway(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("halfway")
    ranks(2).run(_halfway, str(folder))
    return folder


def _go_on(folder: str, world_size: int) -> list[int]:
    updates = []
    for kind in _KINDS:
        average = zp.EMA(0.8)
        _fit(kind, 4, average, path=f"{folder}/{kind}-2").save_checkpoint(f"{folder}/{kind}-on-{world_size}")
        updates.append(average.updates)
    return updates


@pytest.mark.slow
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("world_size", [1, 3])
def test_it_goes_on_with_another_number_of_ranks(
    ranks: Callable[[int], RankPool], halfway: Path, tmp_path: Path, world_size: int
) -> None:
    assert ranks(world_size).run(_go_on, str(halfway), world_size) == [[4] * len(_KINDS)] * world_size
    for kind in _KINDS:
        averages = []
        for name in ("2", "4", f"on-{world_size}"):
            zp.export(halfway / f"{kind}-{name}", tmp_path / f"{kind}-{name}.safetensors")
            averages.append(load_file(tmp_path / f"{kind}-{name}.safetensors"))
        before, through, resumed = averages
        for name, want in through.items():
            assert torch.allclose(resumed[name], want, rtol=0, atol=1e-6), (kind, name)
        assert not torch.allclose(before["first.weight"], through["first.weight"], rtol=0, atol=1e-3)


class _OfMasters(Callback):
    """Averages by hand: of the fp32 masters, and of the weights that the forward uses."""

    def __init__(self) -> None:
        self.masters: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}

    def _add(self, module: Any, decay: float) -> None:
        found = {name.removesuffix(" None"): value for name, value in model.state(module).items() if "None" in name}
        with zp.gathered(module):
            low = {name: param.detach().float().flatten() for name, param in module.named_parameters()}
        for averages, latest in ((self.masters, found), (self.weights, low)):
            for name, value in latest.items():
                averages[name] = decay * averages.get(name, value) + (1 - decay) * value

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._add(pl_module, 0.0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._add(pl_module, 0.8)


def _of_masters(stage: int, precision: Any, path: str) -> tuple[float, float]:
    """The distances of the exported average from those of the masters and of the weights."""
    if precision == "16-true":
        pretend_fp16_kernels()
    by_hand = _OfMasters()
    run = _fit(stage, 4, by_hand, zp.EMA(0.8), precision=precision)
    run.save_checkpoint(path)
    run.strategy.barrier()
    file = f"{path}-{run.global_rank}.safetensors"
    zp.export(path, file)
    average = load_file(file)
    found = []
    for averages in (by_hand.masters, by_hand.weights):
        found.append(max(float((average[name].flatten() - averages[name]).abs().max()) for name in ("first.weight",)))
    return found[0], found[1]


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_it_averages_the_masters(ranks2: Any, tmp_path: Path, stage: int, precision: str) -> None:
    for from_masters, from_weights in ranks2.run(_of_masters, stage, precision, str(tmp_path / "average")):
        assert from_masters <= 1e-7 < 1e-5 < from_weights
