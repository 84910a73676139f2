"""Before a fit: other modules on other ranks, and plugins for checkpoints, are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

import lightning_zeroplus as zp
from lightning_zeroplus.gradients.ranks import from_rank_0
from tests.support.training import Classifier, loader, trainer, zero_plus


def _ours(name: str) -> Any:
    return zp.ZeroPlusFSDPStrategy() if name == "fsdp" else zero_plus(int(name))


class _Another(Classifier):
    """A network that differs from rank to rank."""

    def __init__(self, how: str) -> None:
        self.how = how
        super().__init__(scheduler=None)

    def build(self) -> None:
        rank = dist.get_rank()
        more = [nn.Linear(4, 4)] if rank and self.how == "deeper" else []
        width = 8 + (rank if self.how == "wider" else 0)
        with torch.device("meta" if rank and self.how == "on meta" else "cpu"):
            self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4), *more)


def _train_another(name: str, how: str) -> str:
    with pytest.raises(ValueError) as caught:
        trainer(_ours(name), max_epochs=1).fit(_Another(how), loader())
    return str(caught.value)


@pytest.mark.parametrize("name", ["0", "2", "3", "fsdp"])
def test_other_modules_on_other_ranks_are_refused(ranks2: Any, name: str) -> None:
    """On every rank. DeepSpeed's broadcast waits for ever, or ends the process."""
    for message in ranks2.run(_train_another, name, "wider"):
        assert "rank 0 has 'net.0.weight' of (8, 8), torch.float32 where rank 1 has 'net.0.weight' of (9, 8)" in message
    for message in ranks2.run(_train_another, name, "deeper"):
        assert "rank 0 has nothing where rank 1 has 'net.3.weight' of (4, 4)" in message


def test_a_module_without_values_on_one_rank_is_refused(ranks2: Any) -> None:
    for message in ranks2.run(_train_another, "fsdp", "on meta"):
        assert "rank 1 has 'net.0.weight' of (8, 8), torch.float32 on the meta device" in message


def _ignore(name: str) -> str:
    module = Classifier(scheduler=None)
    module._ddp_params_and_buffers_to_ignore = ["net.0.bias"]
    with pytest.raises(MisconfigurationException) as caught:
        trainer(_ours(name), max_epochs=1).fit(module, loader())
    return str(caught.value)


@pytest.mark.parametrize("name", ["1", "fsdp"])
def test_parameters_that_ddp_leaves_alone_are_refused(ranks2: Any, name: str) -> None:
    for message in ranks2.run(_ignore, name):
        assert "names 'net.0.bias', which DDP leaves to each rank" in message


class _Own(TorchCheckpointIO):
    """A user's."""


def _fit_with(name: str, folder: str, io: Any) -> tuple[bool, int]:
    strategy = _ours(name)
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    run = trainer(strategy, max_epochs=1, callbacks=[saves], plugins=[io], enable_checkpointing=True)
    run.fit(Classifier(scheduler=None), loader())
    return strategy._save_async, len(list(Path(folder).glob("step=*")))


def _refuse(name: str, folder: str) -> str:
    with pytest.raises(MisconfigurationException) as caught:
        _fit_with(name, folder, AsyncCheckpointIO(_Own()) if name == "2" else _Own())
    return str(caught.value)


@pytest.mark.parametrize("name", ["2", "3", "fsdp"])
def test_plugins_for_checkpoints(ranks2: Any, name: str, tmp_path: Path) -> None:
    """Lightning's for writing in the background is ``save_async=True``; a user's own would not be asked."""
    for message in ranks2.run(_refuse, name, str(tmp_path)):
        assert "plugin `_Own` would not be used" in message
    for is_async, saved in ranks2.run(_fit_with, name, str(tmp_path), AsyncCheckpointIO()):
        assert is_async and saved > 0
    for is_async, saved in ranks2.run(_fit_with, name, str(tmp_path / "plain"), TorchCheckpointIO()):
        assert not is_async and saved > 0


def test_tensors_are_sent_some_at_a_time() -> None:
    sizes = [len(some) for some in from_rank_0._chunks([nn.Linear(2**11, 2**11).weight for _ in range(9)])]
    assert sizes == [4, 4, 1]  # of 16 MiB each
