"""A training job in which one rank meets a fault, on purpose; started as a user starts a script."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import lightning_zeroplus as zp
from tests.support.training import Classifier, loader, trainer

#: The step at which the fault comes; by then every rank has reduced, stepped and saved a checkpoint.
FAULT_STEP = 3
SAVE_EVERY = 2
PLANNED = "planned failure"


class FaultyJob(Classifier):
    """A classifier that meets ``fault`` on one rank; the other ranks train on."""

    def __init__(self, fault: str, rank: int) -> None:
        super().__init__(scheduler=None)
        self.fault, self.rank = fault, rank
        self.automatic_optimization = fault != "window"

    def due(self, fault: str) -> bool:
        """Whether ``fault`` is to happen now, on this rank; says so."""
        now = self.fault == fault and self.global_rank == self.rank and self.trainer.global_step >= FAULT_STEP
        if now:
            announce("fault")
        return now

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.due("forward"):
            raise RuntimeError(PLANNED)
        return super().forward(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.due("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.due("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault.endswith("busy") and self.trainer.global_step >= FAULT_STEP:
            self.fail_beside_a_busy_rank()
        if self.fault == "interrupted" and self.trainer.global_step >= FAULT_STEP:
            announce("ready")
        if self.fault == "slow" and self.due("slow"):
            time.sleep(1.5)
        if not self.automatic_optimization:
            return self.window(batch)
        if self.fault == "stopped":
            return self.loss(batch)  # logs nothing: the others wait in the reduction, and not in the world group
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        if self.due("backward"):
            loss.register_hook(_raise(RuntimeError(PLANNED)))
        if self.due("out of memory"):
            loss.register_hook(_raise(torch.OutOfMemoryError("out of memory: " + PLANNED)))
        return loss

    def fail_beside_a_busy_rank(self) -> None:
        """The other rank computes and computes, and calls no collective that could fail."""
        if self.global_rank != self.rank:
            time.sleep(600)
        if self.due("killed, others busy"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.due("raises, others busy"):
            raise RuntimeError(PLANNED)

    def window(self, batch: Any) -> None:
        optimizer = self.optimizers()
        with self.trainer.strategy.coalesce():
            self.manual_backward(self.loss(batch))
            if self.due("window"):
                raise RuntimeError(PLANNED)
            self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.due("validation"):
            raise RuntimeError(PLANNED)
        super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.due("save"):
            raise RuntimeError(PLANNED)
        if self.due("disk full"):
            checkpoint["full"] = _FullDisk()

    def configure_optimizers(self) -> Any:
        return _FaultySGD(self)


class _FaultySGD(torch.optim.SGD):
    def __init__(self, module: FaultyJob) -> None:
        super().__init__(module.parameters(), 0.05, momentum=0.9)
        self.due = module.due

    def step(self, closure: Any = None) -> Any:
        if self.due("step"):
            raise RuntimeError(PLANNED)
        return super().step(closure)


class _FullDisk:
    """Fails when it is written, with part of its file on the disk."""

    def __reduce__(self) -> Any:
        raise OSError(28, "No space left on device: " + PLANNED)


def _raise(error: Exception) -> Any:
    def hook(grad: Tensor) -> None:
        raise error

    return hook


class _Uneven(IterableDataset[Any]):
    """More batches on rank 0; without a length, so that nobody can know."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(12 if os.environ.get("LOCAL_RANK", "0") == "0" else 2 * FAULT_STEP):
            yield torch.randn(8), torch.tensor(0)


class _UnevenWithLength(_Uneven):
    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Announces(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        announce(f"rank {trainer.global_rank}")
        if pl_module.fault == "uneven":
            announce("fault")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.fault == "uneven, no length" and trainer.global_step == 2 * FAULT_STEP:
            announce("fault")


def announce(what: str) -> None:
    """One write, so that the lines of two ranks do not mix."""
    os.write(1, f"{what} | {os.getpid()} | {time.time():.3f}\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", required=True, help="0 to 3, or fsdp")
    parser.add_argument("--fault", required=True)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    limit: dict[str, Any] = {} if args.timeout is None else {"timeout": timedelta(seconds=args.timeout)}
    if args.stage == "fsdp":
        strategy: Any = zp.ZeroPlusFSDPStrategy(**limit)
    else:
        zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100}
        strategy = zp.ZeroPlusStrategy(stage=int(args.stage), config={"zero_optimization": zero}, **limit)
    data = {"uneven": _UnevenWithLength, "uneven, no length": _Uneven}.get(args.fault)
    run = trainer(
        strategy,
        max_epochs=2,
        enable_checkpointing=True,
        default_root_dir=args.folder,
        callbacks=[
            _Announces(),
            ModelCheckpoint(args.folder, "{step}", every_n_train_steps=SAVE_EVERY, save_top_k=-1),
        ],
    )
    module = FaultyJob(args.fault, args.rank)
    run.fit(module, loader(256) if data is None else DataLoader(data(), batch_size=1), loader(64))
    announce("finished")


if __name__ == "__main__":
    main()
