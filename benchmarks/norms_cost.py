"""What ``zp.GradientNorms`` adds to a training step, at the Trainer's default logging interval.

One fit on two CPU ranks takes turns: a round of 50 steps without the callback, a round with it, and so on, so that a
load on the machine that comes and goes hits both. A round is one logging interval: in one of its steps the norms are
reduced, and in all of them each gradient is looked at once. The time of a round is that of the whole loop. Each pair of
rounds gives a ratio; the first pair warms up and is dropped.

The quartiles of the ratio tell how far to trust it: on a machine that does other work they lie far apart.

    python benchmarks/norms_cost.py --stage 2 --stage 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from overhead import BATCH_SIZE, LAYERS

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

GOAL = 1.02
INTERVAL = 50


class Result(NamedTuple):
    """Milliseconds per step at one stage: medians over the rounds; the ratio of each pair of rounds."""

    stage: int
    without_ms: float
    with_ms: float
    ratios: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def row(self) -> str:
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        times = f"{self.without_ms:.2f} ms without, {self.with_ms:.2f} ms with"
        return f"stage {self.stage}: {times}, ratio {self.ratio:.3f} ({low:.3f} to {high:.3f}), goal {GOAL:.2f}"


def train(stage: int, rounds: int, hidden: int, interval: int, out: Path) -> None:
    """Measure one stage; Lightning starts the second rank. Rank 0 writes ``out``."""
    import torch
    from lightning.pytorch import Callback, Trainer
    from torch.utils.data import DataLoader

    import lightning_zeroplus as zp

    class TakesTurns(Callback):
        """Calls a callback in every other round."""

        def __init__(self) -> None:
            self.norms = zp.GradientNorms()
            self.is_on = False
            self.seconds: dict[bool, list[float]] = {False: [], True: []}
            self.started = 0.0

        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % interval == 0:
                self.is_on = batch_idx // interval % 2 == 1
                if self.is_on:
                    self.norms.on_train_start(trainer, pl_module)
                torch.distributed.barrier()
                self.started = time.perf_counter()

        def on_before_backward(self, *args: Any) -> None:
            if self.is_on:
                self.norms.on_before_backward(*args)

        def on_before_optimizer_step(self, *args: Any) -> None:
            if self.is_on:
                self.norms.on_before_optimizer_step(*args)

        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, out: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % interval == 0:
                self.seconds[self.is_on].append((time.perf_counter() - self.started) / interval)
                if self.is_on:
                    assert self.norms.norms["*"] > 0, "nothing was measured in this round"
                    self.norms.on_train_end(trainer, pl_module)

    turns = TakesTurns()
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)
    trainer = Trainer(
        strategy=f"zeroplus_stage{stage}",
        accelerator="cpu",
        devices=2,
        callbacks=[turns],
        max_epochs=1,
        log_every_n_steps=interval,
        use_distributed_sampler=False,
        **off,  # type: ignore[arg-type]
    )
    batches = [torch.randn(BATCH_SIZE, hidden)] * (2 * (rounds + 1) * interval)
    trainer.fit(_module(hidden), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    without, with_it = turns.seconds[False][1:], turns.seconds[True][1:]
    if trainer.is_global_zero:
        before, after = (1e3 * statistics.median(each) for each in (without, with_it))
        ratios = [second / first for first, second in zip(without, with_it, strict=True)]
        out.write_text(json.dumps(Result(stage, before, after, ratios)))


def _module(hidden: int) -> LightningModule:
    import torch
    from lightning.pytorch import LightningModule
    from torch import Tensor, nn

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(hidden, hidden), nn.GELU()) for _ in range(LAYERS)))

        def training_step(self, batch: Tensor) -> Tensor:
            loss: Tensor = self.net(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    return Module()


def measure(stage: int, options: argparse.Namespace) -> Result:
    """Measure one stage in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        command = [sys.executable, __file__, "--stage", str(stage), "--worker", str(out)]
        for name in ("rounds", "hidden", "interval"):
            command += [f"--{name}", str(getattr(options, name))]
        # Two ranks on few cores: more threads than one would measure the scheduler.
        done = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0 or not out.exists():
            sys.exit(f"{done.stdout}\nStage {stage}: the run failed with status {done.returncode}, see above.")
        return Result(*json.loads(out.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", type=int, action="append", choices=range(4), help="repeatable; default: all")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of rounds, after one (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model (default: %(default)s)")
    parser.add_argument("--interval", type=int, default=INTERVAL, help="steps of a round (default: %(default)s)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.hidden, options.interval) < 1 or options.rounds < 2:
        parser.error("--hidden and --interval must be at least 1, --rounds at least 2")
    if options.worker is not None:
        train(options.stage[0], options.rounds, options.hidden, options.interval, options.worker)
        return
    for stage in options.stage or range(4):
        print(measure(stage, options).row(), flush=True)


if __name__ == "__main__":
    main()
