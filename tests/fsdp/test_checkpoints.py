"""Checkpoints of ZeroPlusFSDPStrategy: both forms, another world size, and no code from the file."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from lightning_zeroplus.testing import RankPool
from tests.fsdp.training import Task, full, loader, ours, relative_error, trainer, weights


def _fit(path: str | None, distributed: bool, max_steps: int, **kwargs: Any) -> Task:
    task = Task(optimizer="adamw")
    strategy = ours(save_distributed_checkpoint=distributed, **kwargs)
    trainer(strategy, max_steps=max_steps, max_epochs=-1).fit(task, loader(32), ckpt_path=path)
    return task


def _save(path: str, distributed: bool) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    task = Task(optimizer="adamw")
    run = trainer(ours(save_distributed_checkpoint=distributed), max_steps=5, max_epochs=-1)
    run.fit(task, loader(32))  # one batch per epoch: Lightning goes on with another one after the end of a fit
    run.save_checkpoint(path)
    return weights(task), _moments(task), weights(_fit(None, distributed, 10))


def _moments(task: Task) -> dict[str, Tensor]:
    optimizer = task.optimizers(use_pl_optimizer=False)
    state = get_optimizer_state_dict(task, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {name: full(value) for name, value in state.items() if isinstance(value, Tensor)}


def _load(path: str, distributed: bool) -> tuple[Tensor, dict[str, Tensor], int]:
    # No step is left to make: what is there is what was loaded.
    task = _fit(path, distributed, 5)
    return weights(task), _moments(task), task.trainer.global_step


def _resume(path: str, distributed: bool) -> Tensor:
    return weights(_fit(path, distributed, 10))


class _SeesItsShard(Task):
    shard = 0

    def on_train_start(self) -> None:
        self.shard = next(self.parameters()).to_local().numel()


def _replicated(steps: int) -> Tensor:
    task = _SeesItsShard(optimizer="adamw")
    strategy = ours(replicate_size=2)
    trainer(strategy, max_steps=steps).fit(task, loader())
    assert dict(zip(strategy.device_mesh.mesh_dim_names, strategy.device_mesh.shape, strict=True)) == {
        "replicate": 2,
        "shard": 2,
        "tensor_parallel": 1,
    }
    assert strategy.distributed_sampler_kwargs["num_replicas"] == 4
    assert task.shard * 2 == next(task.parameters()).numel()
    return weights(task)


def _ddp(steps: int) -> Tensor:
    task = Task(optimizer="adamw")
    trainer("ddp", max_steps=steps).fit(task, loader())
    return weights(task)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("distributed", [True, False])
def test_resumes_exactly_at_the_same_and_at_another_world_size(
    ranks: Callable[[int], RankPool], tmp_path: Path, distributed: bool
) -> None:
    path = str(tmp_path / "checkpoint")
    params, moments, uninterrupted = ranks(2).run(_save, path, distributed)[0]
    assert os.path.isdir(path) == distributed
    assert torch.equal(ranks(2).run(_resume, path, distributed)[0], uninterrupted)
    assert not torch.equal(params, uninterrupted)
    for world_size in (2, 4):
        for loaded, loaded_moments, step in ranks(world_size).run(_load, path, distributed):
            assert torch.equal(loaded, params) and step == 5
            assert loaded_moments.keys() == moments.keys() and len(moments) == 3 * 12
            assert all(torch.equal(loaded_moments[name], moments[name]) for name in moments)


def test_hsdp_trains_as_ddp(ranks: Callable[[int], RankPool]) -> None:
    want = ranks(4).run(_ddp, 5)[0]
    assert max(relative_error(got, want) for got in ranks(4).run(_replicated, 5)) <= 1e-6


# -- no code from the file --------------------------------------------------------------------------------------------


class _Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.makedirs, (self.path, 0o777, True)


class _Saves(Task):
    """Puts a payload where ``place`` says."""

    def __init__(self, place: str, payload: _Payload) -> None:
        super().__init__()
        self.place, self.payload = place, payload

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.place == "checkpoint":
            checkpoint["extra"] = self.payload


def _poison(path: str, distributed: bool, place: str, proof: str) -> None:
    task = _Saves(place, _Payload(proof))
    run = trainer(ours(save_distributed_checkpoint=distributed), max_steps=1)
    run.fit(task, loader())
    run.save_checkpoint(path)
    if place == "optimizer":
        optimizer = get_optimizer_state_dict(task, run.optimizers[0])
        optimizer["param_groups"][0]["lr"] = _Payload(proof)
        state = {"state_dict": task.state_dict(), "optimizer_0": optimizer}
        torch.distributed.checkpoint.save(state, checkpoint_id=path)
    if place == "metadata" and run.global_rank == 0:
        file = Path(path, ".metadata")
        metadata = pickle.loads(file.read_bytes())
        metadata.planner_data = _Payload(proof)
        file.write_bytes(pickle.dumps(metadata))
    torch.distributed.barrier()


def _try_to_load(path: str, distributed: bool) -> str:
    strategy = ours(save_distributed_checkpoint=distributed)
    try:
        trainer(strategy, max_steps=2).fit(Task(), loader(), ckpt_path=path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


@pytest.mark.parametrize(
    ("distributed", "place"), [(True, "metadata"), (True, "optimizer"), (True, "checkpoint"), (False, "checkpoint")]
)
def test_no_code_from_a_checkpoint_is_executed(ranks2: Any, tmp_path: Path, distributed: bool, place: str) -> None:
    path, proof = str(tmp_path / "checkpoint"), tmp_path / "executed"
    ranks2.run(_poison, path, distributed, place, str(proof))
    proof.rmdir() if proof.exists() else None
    for said in ranks2.run(_try_to_load, path, distributed):
        assert "makedirs" in said
    assert not proof.exists()
    # The payload works, where it is read without care.
    if place == "checkpoint":
        torch.load(Path(path, "meta.pt") if distributed else path, weights_only=False)
    else:
        with contextlib.suppress(Exception):  # what it leaves instead of the metadata does not make sense
            dcp_to_torch_save(path, tmp_path / "converted")
    assert proof.exists()


def _keep_best(folder: str) -> str:
    callback = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1)
    task = Task()
    run = trainer(ours(), max_epochs=2, callbacks=[callback], enable_checkpointing=True)
    run.fit(task, loader(64), loader(32))
    (metrics,) = run.validate(task, loader(32), ckpt_path="best", verbose=False)
    assert metrics["val_loss"] == pytest.approx(float(callback.best_model_score), rel=1e-6)
    return callback.best_model_path


def test_model_checkpoint_and_validation_of_the_best(ranks2: Any, tmp_path: Path) -> None:
    first, second = ranks2.run(_keep_best, str(tmp_path))
    assert first == second and Path(first).is_dir()


def _adapter(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    class Saves(Task):
        def on_train_batch_end(self, *args: Any) -> None:
            if self.global_rank == 0:  # alone, as `peft.PeftModel.save_pretrained` does
                save_file(dict(self.net.last.state_dict()), f"{folder}/adapter.safetensors")

    task = Saves()
    trainer(ours(), max_steps=2).fit(task, loader())
    return load_file(f"{folder}/adapter.safetensors"), {k: v.clone() for k, v in task.net.last.state_dict().items()}


def test_safetensors_writes_whole_tensors_of_a_state_dict(ranks2: Any, tmp_path: Path) -> None:
    """It reads at their addresses. What was gathered there was freed before."""
    for written, want in ranks2.run(_adapter, str(tmp_path)):
        assert written.keys() == want.keys()
        assert all(torch.equal(written[name], value) for name, value in want.items())
