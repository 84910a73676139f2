"""What a training step costs under ZeroPlusStrategy, against a plain DeepSpeed loop.

Both sides train the same model on the same batches, with the same DeepSpeed config (the one the strategy produced),
in the same processes, taking turns step by step: raw, ours, raw, ours, and so on, so that a load on the machine that
comes and goes hits both sides. Each round gives a ratio of median step times; the median of these ratios is reported.
The first round warms up and is dropped. In the end both sides must have come to the same loss.

A *step* is, on both sides, what lies between the request for a training step and the end of the optimizer step:
forward, backward, reduction, update. On our side it begins where Lightning calls the strategy, so it includes the
strategy, the precision plugin and the engine but not Lightning's loop around them. On both sides the ranks begin a step
together: one that comes late out of Lightning's loop would keep the other one waiting in the step's first collective.
The columns named *Trainer* time that loop as well, with its hooks and data loading, against the raw loop; both are
means over whole rounds, each without the other side's steps.

The quartiles of the ratio tell how far to trust it: on a machine that does other work they lie far apart.

    python benchmarks/overhead.py --stage 0 --stage 1 --stage 2 --stage 3
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

GOAL = 1.03
BATCH_SIZE = 128
LAYERS = 4


class Round(NamedTuple):
    """Seconds per step in one round: the median step of each side, and whole rounds divided by their steps."""

    raw: float
    ours: float
    raw_loop: float
    trainer_loop: float


class Result(NamedTuple):
    """Milliseconds per step and ratios at one stage: medians over the rounds, and the quartiles of the ratio."""

    stage: int
    raw_ms: float
    ours_ms: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    trainer_ms: float
    trainer_ratio: float
    rounds: int


def summarize(stage: int, rounds: list[Round]) -> Result:
    median = statistics.median
    ratios = [r.ours / r.raw for r in rounds]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Result(
        stage=stage,
        raw_ms=1e3 * median(r.raw for r in rounds),
        ours_ms=1e3 * median(r.ours for r in rounds),
        ratio=median(ratios),
        ratio_quartiles=(low, high),
        trainer_ms=1e3 * median(r.trainer_loop for r in rounds),
        trainer_ratio=median(r.trainer_loop / r.raw_loop for r in rounds),
        rounds=len(rounds),
    )


def train(stage: int, steps: int, rounds: int, hidden: int, accelerator: str, out: Path) -> None:
    """Run the comparison at one stage on two CPU ranks (Lightning starts the second) or one GPU; write ``out``."""
    import deepspeed
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    from lightning_zeroplus import ZeroPlusStrategy

    def now() -> float:
        if accelerator == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def together() -> float:
        """The time when all ranks begin a step."""
        torch.distributed.barrier()
        return now()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(hidden, hidden), nn.GELU()) for _ in range(LAYERS)))

        def forward(self, batch: Tensor) -> Tensor:
            return self.layers(batch).square().mean()

    def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=1e-4)

    class TimedStrategy(ZeroPlusStrategy):
        started = 0.0

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.started = together()
            return super().training_step(*args, **kwargs)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = Net()
            self.seconds: list[float] = []
            self.loss = torch.tensor(float("nan"))

        def training_step(self, batch: Tensor) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.loss = self.net(batch)
            self.manual_backward(self.loss)
            optimizer.step()
            assert isinstance(self.trainer.strategy, TimedStrategy)
            self.seconds.append(now() - self.trainer.strategy.started)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.net)

    class RawLoop(Callback):
        """Builds the plain engine on the strategy's config, and lets it take a step before each of ours."""

        def __init__(self) -> None:
            self.rounds: list[Round] = []
            self.engine: Any = None
            self.raw: list[float] = []
            self.raw_loop = 0.0
            self.started = 0.0
            self.loss = torch.tensor(float("nan"))

        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            assert isinstance(trainer.strategy, ZeroPlusStrategy)
            net = Net().to(accelerator)
            self.engine, *_ = deepspeed.initialize(
                model=net, optimizer=make_optimizer(net), config=copy.deepcopy(trainer.strategy.config)
            )
            self.started = now()

        def on_train_batch_start(
            self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, batch_idx: int
        ) -> None:
            before = now()
            start = together()
            self.loss = self.engine(batch)
            self.engine.backward(self.loss)
            self.engine.step()
            self.raw.append(now() - start)
            self.raw_loop += now() - before

        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
        ) -> None:
            if (batch_idx + 1) % steps == 0:
                assert isinstance(pl_module, Module)
                self.rounds.append(
                    Round(
                        raw=statistics.median(self.raw),
                        ours=statistics.median(pl_module.seconds),
                        raw_loop=sum(self.raw) / steps,
                        trainer_loop=(now() - self.started - self.raw_loop) / steps,
                    )
                )
                self.raw.clear()
                pl_module.seconds.clear()
                self.raw_loop, self.started = 0.0, now()

    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(BATCH_SIZE, hidden, generator=generator).to(accelerator) for _ in range(steps)]
    loop = RawLoop()
    trainer = Trainer(
        strategy=TimedStrategy(stage=stage, reduction="auto"),
        accelerator=accelerator,
        devices=2 if accelerator == "cpu" else 1,
        callbacks=[loop],
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    # The batches come ready made: both sides read the same list.
    module = Module()
    trainer.fit(module, DataLoader(batches * (rounds + 1), batch_size=None))  # type: ignore[arg-type]
    # Unless both sides did the same training, their times cannot be compared.
    torch.testing.assert_close(module.loss, loop.loss)
    if trainer.is_global_zero:
        out.write_text(json.dumps(summarize(stage, loop.rounds[1:])._asdict()))


def measure(stage: int, options: argparse.Namespace) -> Result:
    """Measure one stage in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        command = [sys.executable, __file__, "--stage", str(stage), "--worker", str(out)]
        for name in ("steps", "rounds", "hidden", "accelerator"):
            command += [f"--{name}", str(getattr(options, name))]
        # Two ranks on few cores: more threads than one would measure the scheduler.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0 or not out.exists():
            sys.exit(f"{done.stdout}\nStage {stage}: the run failed with status {done.returncode}, see above.")
        return Result(**json.loads(out.read_text()))


def show(results: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Median step: ZeroPlusStrategy against a plain DeepSpeed loop")
    for column in (
        "stage",
        "raw ms/step",
        "ours ms/step",
        "ratio",
        "quartiles",
        "goal",
        "Trainer ms/step",
        "Trainer ratio",
    ):
        table.add_column(column, justify="right", no_wrap=column in ("quartiles", "ratio"))
    for r in results:
        colour = "green" if r.ratio <= GOAL else "red"
        ratio = f"[{colour}]{r.ratio:.3f}[/]"
        quartiles = "{:.2f}–{:.2f}".format(*r.ratio_quartiles)
        cells = (f"{r.raw_ms:.2f}", f"{r.ours_ms:.2f}", ratio, quartiles, f"{GOAL:.2f}")
        table.add_row(str(r.stage), *cells, f"{r.trainer_ms:.2f}", f"{r.trainer_ratio:.3f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", type=int, action="append", choices=range(4), help="repeatable; default: all")
    parser.add_argument("--steps", type=int, default=50, help="steps per round and side (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds, after one to warm up (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model (default: %(default)s)")
    parser.add_argument(
        "--accelerator", choices=("cpu", "cuda"), default="cpu", help="two CPU ranks, or one GPU (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.steps, options.rounds, options.hidden) < 1:
        parser.error("--steps, --rounds and --hidden must be at least 1")
    if options.worker is not None:
        stage, steps, rounds, hidden = options.stage[0], options.steps, options.rounds, options.hidden
        train(stage, steps, rounds, hidden, options.accelerator, options.worker)
        return
    results = []
    for stage in options.stage or range(4):
        print(f"Measuring stage {stage} ...", file=sys.stderr, flush=True)
        results.append(measure(stage, options))
    if options.json:
        print(json.dumps({"goal": GOAL, "results": [result._asdict() for result in results]}, indent=2))
    else:
        show(results)


if __name__ == "__main__":
    main()
