"""Checkpoints under Fabric: other stages and numbers of ranks, other strategies' files, errors, and no code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zeroplus as zp
from lightning_zeroplus.checkpoint import atomic
from lightning_zeroplus.testing import RankPool
from tests.strategy.test_fabric import fabric

_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 20}}

_BATCH = torch.arange(20.0).square().sin().view(5, 4)


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    net[3].weight = net[2].weight  # tied
    return net


def _strategy(stage: Any) -> Any:
    return zp.ZeroPlusFabricStrategy(stage, config=_ALL) if isinstance(stage, int) else stage


def _set_up(stage: Any, seed: int = 0, optimizers: int = 1, precision: str = "32-true") -> tuple[Any, ...]:
    run = fabric(_strategy(stage), precision)
    net = _net(seed)
    made = [torch.optim.AdamW(params, 0.1) for params in _parts(net, optimizers)]
    return run, net, *run.setup(net, *made)


def _parts(net: nn.Sequential, count: int) -> list[Any]:
    return [net.parameters()] if count == 1 else [[*net[0].parameters(), *net[1].parameters()], net[2:].parameters()]


def _step(run: L.Fabric, model: Any, *optimizers: Any) -> list[Tensor]:
    run.backward(model(_BATCH).square().sum())
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return _weights(model)


def _weights(model: Any) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def _equal(got: list[Tensor], want: list[Tensor], bound: float = 0.0) -> bool:
    return all(torch.allclose(a.float(), b.float(), 0, bound) for a, b in zip(got, want, strict=True))


def _save(path: str, stage: Any, optimizers: int = 1, precision: str = "32-true") -> list[Tensor]:
    """Two steps, a save, and one step more."""
    run, _, model, *steps = _set_up(stage, 0, optimizers, precision)
    for _ in range(2):
        _step(run, model, *steps)
    names = {f"optimizer{number}": each for number, each in enumerate(steps)}
    run.save(path, {"model": model, **names, "at": 2})
    return _step(run, model, *steps)


def _resume(path: str, stage: Any, optimizers: int = 1, precision: str = "32-true") -> list[Tensor]:
    run, _, model, *steps = _set_up(stage, 1, optimizers, precision)
    state = {"model": model, "at": 0, **{f"optimizer{number}": each for number, each in enumerate(steps)}}
    assert run.load(path, state) == {} and state["at"] == 2
    return _step(run, model, *steps)


@pytest.mark.parametrize(
    ("saved", "stage", "ranks_then", "optimizers"),
    [
        (3, 1, 3, 1),
        (1, 3, 1, 2),
        (2, 0, 2, 2),
        ("ddp", 3, 2, 1),
        ("ddp", 1, 3, 2),
        *(pytest.param(a, b, c, 1, marks=pytest.mark.thorough) for a in range(4) for b in range(4) for c in (1, 2, 3)),
    ],
)
def test_any_stage_and_number_of_ranks_to_any(
    ranks: Callable[[int], RankPool], tmp_path: Path, saved: Any, stage: int, ranks_then: int, optimizers: int
) -> None:
    path = str(tmp_path / "saved")
    want = ranks(2).run(partial(_save, path, saved, optimizers))[0]
    for got in ranks(ranks_then).run(partial(_resume, path, stage, optimizers)):
        assert _equal(got, want, 1e-6)  # the sum over the ranks is rounded


@pytest.mark.parametrize("precision", ["bf16-true", pytest.param("16-true", marks=pytest.mark.thorough)])
def test_master_weights(ranks2: RankPool, tmp_path: Path, precision: str) -> None:
    path = str(tmp_path / "saved")
    want = ranks2.run(partial(_save, path, 2, 1, precision))[0]
    assert _equal(ranks2.run(partial(_resume, path, 3, 1, precision))[0], want)


def _several(folder: str, stage: int) -> None:
    """Two models, one of them without an optimizer, a filter, and what else may be saved."""
    run, _, model, optimizer = _set_up(stage)
    other = run.setup_module(nn.Linear(2, 2))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    _step(run, model, optimizer)
    schedule.step()
    plain = nn.Linear(1, 1)
    state = {"other": other, "model": model, "optimizer": optimizer, "schedule": schedule, "plain": plain, "at": [1]}
    run.save(folder, state)
    whole = run.load(folder)
    assert whole.keys() == state.keys() and whole["at"] == [1]
    assert _equal(list(whole["model"].values()), _weights(model))
    with zp.gathered(other.module):
        assert _equal(list(whole["other"].values()), _weights(other))
    # What is returned is what DDP saves: a plain module and a torch optimizer load it.
    net = _net(5)
    net.load_state_dict(whole["model"])
    plain_optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    plain_optimizer.load_state_dict(whole["optimizer"])
    net(_BATCH).square().sum().backward()
    plain_optimizer.step()
    assert _equal(_weights(net), _step(run, model, optimizer), 1e-6)
    with pytest.raises(ValueError, match=r"'other', 'model'.*model='\.\.\.'"):
        zp.export(folder, f"{folder}.safetensors")
    if run.is_global_zero:
        zp.export(folder, f"{folder}.safetensors", model="model")
        assert load_file(f"{folder}.safetensors").keys() == whole["model"].keys()
    # A model alone, its optimizer alone.
    run, net, model, optimizer = _set_up(stage, 3)
    before = _weights(model)
    rest = run.load(folder, {"optimizer": optimizer}, strict=False)
    assert _equal(_weights(model), before) and rest["at"] == [1] and optimizer.param_groups[0]["lr"] == 0.05
    run.load(folder, {"model": model})
    assert _equal(_weights(model), list(whole["model"].values()))
    with pytest.raises(KeyError, match="nowhere"):
        run.load(folder, {"model": model, "nowhere": 1})
    # A filter sees whole tensors.
    shapes = {}

    def keep(name: str, value: Any) -> bool:
        shapes[name] = tuple(value.shape)
        return not name.startswith("0.") and bool(value.isfinite().all())

    run.save(folder, {"model": model}, filter={"model": keep})
    assert shapes == {name: tuple(value.shape) for name, value in whole["model"].items()}
    run, _, model, _ = _set_up(stage, 4)
    first = _weights(model)
    with pytest.raises(RuntimeError, match=r"missing: 0\.bias, 0\.num_batches_tracked"):
        run.load(folder, {"model": model})
    assert _equal(_weights(model), first)
    run.load(folder, {"model": model}, strict=False)
    assert _equal(_weights(model), first[:5] + list(whole["model"].values())[5:])


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.thorough), 2, 3])
def test_several_models_filters_and_values(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    ranks2.run(_several, str(tmp_path / "saved"), stage)


class _Code:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path(__file__).with_name("executed"),))


def _bad(folder: str) -> None:
    run, _, model, optimizer = _set_up(3)
    path, rank = Path(folder, "saved"), dist.get_rank()
    state = {"model": model, "optimizer": optimizer}
    run.save(path, state)
    before = _weights(model)

    # One rank cannot write: all raise its error, and the old checkpoint stays.
    class Fails:
        def state_dict(self) -> Any:
            if rank == 1:
                raise OSError("the disk is gone")
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(OSError, match="the disk is gone"):
        run.save(path, {**state, "fails": Fails()})
    commit, atomic.commit = atomic.commit, lambda path: (_ for _ in ()).throw(OSError("no space"))  # type: ignore
    try:
        with pytest.raises(OSError, match="no space"):
            run.save(path, state)
    finally:
        atomic.commit = commit
    run.load(path, state)
    with pytest.raises(ValueError, match="the name 'zeroplus' is taken"):
        run.save(path, {**state, "zeroplus": 1})
    for nested, said in (([model], "is a list that has a ZeroPlusEngine"), ({"of": optimizer}, "is a dict that has a")):
        with pytest.raises(ValueError, match=rf"state\['nested'\]` {said}.*a name of its own"):
            run.save(path, {**state, "nested": nested})
    with pytest.raises(ValueError, match="'model' and 'again' are the same model"):
        run.save(path, {"model": model, "again": model}, filter={"again": lambda name, value: True})
    run.save(path.with_name("plain"), {"at": 3})
    assert run.load(path.with_name("plain")) == {"at": 3}
    # Code is not executed; nothing is loaded.
    run.save(path.with_name("code"), {**state, "code": _Code()})
    for weights_only in (None, True):
        with pytest.raises(RuntimeError, match="contains more than data"):
            run.load(path.with_name("code"), state, weights_only=weights_only)
    assert not Path(__file__).with_name("executed").exists()
    # DeepSpeed's own folders, other folders, other models, damage on one rank.
    old = path.with_name("old")
    model._forward_module.save_checkpoint(str(old), client_state={}, tag="checkpoint")  # as Lightning's strategy
    run.barrier()
    for each in (old, old / "checkpoint"):
        with pytest.raises(RuntimeError, match="written by DeepSpeed.*zero_to_fp32"):
            run.load(each, state)
    run_0, _, model_0, optimizer_0 = _set_up(0)
    model_0._forward_module.save_checkpoint(str(old.with_name("old0")), client_state={}, tag="checkpoint")
    run_0.barrier()
    with pytest.raises(RuntimeError, match=r"written by DeepSpeed.*mp_rank_00_model_states\.pt', weights_only=False"):
        run_0.load(old.with_name("old0"), {"model": model_0, "optimizer": optimizer_0})
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run.load(path.with_name("nowhere"), state)
    with pytest.raises(RuntimeError, match=r"folder.*fabric\.load\(path"):
        run.load_raw(path, model)
    with pytest.raises(RuntimeError, match=r"has no optimizer 'model'"):
        run.load(path, {"model": optimizer})
    run.barrier()
    if rank == 0:
        data = next(path.glob("__1_0.distcp"))
        data.write_bytes(data.read_bytes()[:-9])
    run.barrier()
    with pytest.raises(RuntimeError, match="truncated"):
        run.load(path, state)
    assert _equal(_weights(model), before)


def test_bad_checkpoints(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(_bad, str(tmp_path))


class _Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def training_step(self, batch: Any) -> Tensor:
        return self.net(batch).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.1)


def _of_the_trainer(folder: str) -> None:
    """A Trainer's folder, a Trainer's file, and a raw file: weights are loaded. The Trainer refuses Fabric's."""
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, **quiet}
    data = DataLoader([_BATCH], batch_size=None)  # type: ignore[arg-type]
    for strategy in ("zeroplus_stage2", "ddp"):
        trainer, module = pl.Trainer(strategy=strategy, **settings), _Module()
        trainer.fit(module, data)
        path = Path(folder, strategy)
        trainer.save_checkpoint(path)
        want = [value.clone() for value in module.state_dict().values()]
        run = fabric(_strategy(3))
        other = _Module()
        model, _ = run.setup(other, torch.optim.AdamW(other.parameters(), 0.1))
        rest = run.load(path, {"state_dict": model})
        assert rest["global_step"] == 1 and _equal(_weights(model), want)
        # What is returned is in memory: the file may be written again.
        if strategy == "ddp":
            kept = rest["optimizer_states"][0]["state"][0]["exp_avg"]
            run.barrier()
            if run.is_global_zero:
                with open(path, "r+b") as file:
                    file.write(bytes(path.stat().st_size))
            run.barrier()
            assert kept.abs().sum() > 0
    run, _, model, optimizer = _set_up(3, 1)
    raw = Path(folder, "raw.safetensors")
    if run.is_global_zero:
        save_file({name: value.clone() for name, value in _net(2).state_dict().items()}, raw)
    run.barrier()
    run.load_raw(raw, model)
    assert _equal(_weights(model), _weights(_net(2)))
    ours = Path(folder, "fabric")
    run.save(ours, {"model": model, "optimizer": optimizer})
    with pytest.raises(RuntimeError, match=r"saved by `fabric\.save`.*export"):
        pl.Trainer(strategy="zeroplus_stage2", **settings).fit(_Module(), data, ckpt_path=ours)


def test_files_of_the_trainer(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(_of_the_trainer, str(tmp_path))
