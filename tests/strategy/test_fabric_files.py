"""Checkpoints under Fabric: the files of Lightning's DeepSpeed strategy, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DeepSpeedStrategy
from torch import nn

from tests.strategy.test_fabric import fabric


def _set_up(stage: int, seed: int = 0, optimizers: int = 1) -> tuple[Any, ...]:
    run = fabric(f"zeroplus_stage{stage}")
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    made = [torch.optim.AdamW(part, 0.1) for part in _parts(net, optimizers)]
    return run, net, *run.setup(net, *made)


def _parts(net: nn.Sequential, count: int) -> list[Any]:
    return [net.parameters()] if count == 1 else [layer.parameters() for layer in net]


def _step(run: L.Fabric, model: Any, *optimizers: Any) -> list[torch.Tensor]:
    run.backward(model(torch.ones(2, 4)).square().sum())
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def _equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _as_lightning(folder: str, stage: int) -> None:
    """Lightning's own functions write the same files, read ours, and write what we read."""
    run, _, model, optimizer = _set_up(stage)
    _step(run, model, optimizer)
    ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
    state = {"model": model._forward_module, "optimizer": optimizer.optimizer, "at": 3}
    lightning: Any = SimpleNamespace(
        broadcast=run.strategy.broadcast,
        _convert_stateful_objects_in_state=run.strategy._convert_stateful_objects_in_state,
        exclude_frozen_parameters=False,
        load_full_weights=False,
    )
    run.save(ours, {"model": model, "optimizer": optimizer, "at": 3})
    DeepSpeedStrategy.save_checkpoint(lightning, theirs, dict(state))
    run.barrier()
    assert _names(ours) == _names(theirs)
    for file in sorted((ours / "checkpoint").glob("*")):
        mine, other = (torch.load(root / "checkpoint" / file.name, weights_only=False) for root in (ours, theirs))
        assert mine.keys() == other.keys()
    want = _step(run, model, optimizer)

    run, _, model, optimizer = _set_up(stage, seed=1)
    state = {"model": model, "optimizer": optimizer, "at": 0}
    run.load(theirs, state)
    assert state["at"] == 3 and _equal(_step(run, model, optimizer), want)
    run, _, model, optimizer = _set_up(stage, seed=2)
    state = {"model": model._forward_module, "optimizer": optimizer.optimizer, "at": 0}
    DeepSpeedStrategy.load_checkpoint(lightning, ours, state)
    assert state["at"] == 3 and _equal(_step(run, model, optimizer), want)


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_the_files_are_those_of_lightning(ranks2: Any, tmp_path: Path, stage: int) -> None:
    ranks2.run(_as_lightning, str(tmp_path), stage)


def _two_optimizers(folder: str, stage: int) -> None:
    """One of them has the name under which DeepSpeed writes the states of both."""
    run, _, model, *optimizers = _set_up(stage, optimizers=2)
    _step(run, model, *optimizers)
    run.save(folder, {"model": model, "optimizer": optimizers[0], "other": optimizers[1]})
    want = _step(run, model, *optimizers)
    run, _, model, *optimizers = _set_up(stage, seed=1, optimizers=2)
    run.load(folder, {"model": model, "optimizer": optimizers[0], "other": optimizers[1]})
    assert _equal(_step(run, model, *optimizers), want)


@pytest.mark.parametrize("stage", (0, 2))
def test_two_optimizers(ranks2: Any, tmp_path: Path, stage: int) -> None:
    ranks2.run(_two_optimizers, str(tmp_path / "saved"), stage)


def _refusals(folder: str) -> None:
    run, _, model, optimizer = _set_up(2)
    _, _, other, _ = _set_up(2)
    path = Path(folder, "saved")
    with pytest.raises(ValueError, match=r"There are 2\. Several models need a path each"):
        run.save(path, {"model": model, "other": other})
    with pytest.raises(ValueError, match=r"There are 0"):
        run.save(path, {"at": 3})
    with pytest.raises(ValueError, match=r"have a 'global_steps' of their own"):
        run.save(path, {"model": model, "global_steps": 3})
    with pytest.raises(TypeError, match=r"fabric\.save\(filter=\.\.\.\)"):
        run.save(path, {"model": model}, filter={"model": lambda *_: True})
    assert not path.exists()
    run.save(path, {"model": model, "optimizer": optimizer})
    with pytest.raises(FileNotFoundError, match="nowhere' is no folder"):
        run.load(Path(folder, "nowhere"), {"model": model})
    with pytest.raises(FileNotFoundError, match="Did you mean '.*saved'"):
        run.load(path / "checkpoint", {"model": model})
    with pytest.raises(TypeError, match="weights_only=True"):
        run.load(path, {"model": model}, weights_only=True)
    with pytest.raises(ValueError, match=r"fabric\.load\(path, \{'model': model, 'optimizer': optimizer\}\)"):
        run.load(path)
    run.load(path, {"model": model})
    assert dist.is_initialized()


def test_refusals(ranks2: Any, tmp_path: Path) -> None:
    ranks2.run(_refusals, str(tmp_path))
