"""Time, memory and bytes on the wire of a training step, beside DDP, FSDP2 by hand and DeepSpeed.

Each contender trains the same model on the same batches, in processes of its own that stay alive for the whole run.
The contenders take turns step by step, while all others wait: a load on the machine that comes and goes hits all of
them. Reported are, per contender, the median of its times divided by those of DDP in the same round, how far the
resident set of a rank has grown at most since before the model was made, and the bytes that a step moves through the
loopback device, divided by the number of ranks (Linux counts them; the least of all steps, so that another program on
the machine does not count).

A *step* lasts from the first batch to the end of the optimizer's step, for the slowest rank. With ``--backwards 4``
four batches are accumulated in the way of each contender: ``accumulate_grad_batches`` under Lightning. Three more take
part then, which reduce in every backward on the CPU, and once on GPUs: what is not the default. In the end all
contenders must have come to the same loss.

On GPUs a step ends when its last kernel has, memory is what the device has allocated at most, and bytes on the wire
are not counted. There must be a GPU for each rank; with one rank the table shows what a step costs the host.

    python benchmarks/peers.py --ranks 2 --backwards 1 --backwards 4
    python benchmarks/peers.py --accelerator cuda --ranks 1 --model small --model wide
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import math
import os
import signal
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

CONTENDERS = (
    "ddp",
    "fsdp2_by_hand",
    "zeroplus_fsdp",
    *(f"zeroplus_{stage}" for stage in range(4)),
    *(f"deepspeed_{stage}" for stage in range(1, 4)),
)
#: With several backwards: those that differ by when they reduce.
SHARDED = ("zeroplus_2", "zeroplus_3", "zeroplus_fsdp")
OTHERWISE = {"cpu": tuple(f"{name}_backward" for name in SHARDED), "cuda": tuple(f"{name}_step" for name in SHARDED)}
WARMUP = 2
#: Linux's ``PR_SET_PDEATHSIG``.
_END_WITH_PARENT = 1
#: The largest relative difference of two losses: fp32 sums in another order, after some steps of Adam.
BOUND = 1e-3


class Shape(NamedTuple):
    """A model of equal layers, and the tokens of a batch."""

    layers: int
    width: int
    rows: int
    transformer: bool = True


SHAPES = {"small": Shape(6, 192, 8), "large": Shape(4, 640, 8), "many": Shape(150, 32, 32, transformer=False)}
#: For GPUs, which would wait for the host at the other sizes.
WIDE = {"wide": Shape(8, 1536, 32)}
QUICK = {"quick": Shape(2, 32, 2)}
TOKENS = 16


class Row(NamedTuple):
    """One contender: medians over the rounds."""

    model: str
    ranks: int
    backwards: int
    contender: str
    milliseconds: float
    to_ddp: float
    grown_mib: float
    wire_mib: float
    loss: float


class Seen(NamedTuple):
    """What one contender did: per round the time of a step and the bytes it sent, and each rank's memory."""

    seconds: list[float]
    wire: list[int]
    grown: int
    loss: float


class Job(NamedTuple):
    """What a process is to train."""

    contender: str
    shape: Shape
    rank: int
    ranks: int
    backwards: int
    steps: int
    port: int
    accelerator: str = "cpu"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=SHAPES | WIDE, action="append", help="repeatable (default: all but wide)")
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    names = (*CONTENDERS, *OTHERWISE["cpu"], *OTHERWISE["cuda"])
    parser.add_argument("--contender", choices=names, action="append", help="repeatable (default: all)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backwards", type=int, action="append", help="per step; repeatable (default: 1, 4)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="a tiny model and two rounds: does the benchmark run?")
    parser.add_argument("--output", type=Path, default=Path("outputs", "peers"))
    chosen = parser.parse_args(arguments)
    shapes = QUICK if chosen.quick else {name: (SHAPES | WIDE)[name] for name in chosen.model or SHAPES}
    backwards = chosen.backwards or ([2] if chosen.quick else [1, 4])
    prepare(chosen.accelerator)
    rows = []
    for name, shape in shapes.items():
        for count in backwards:
            rounds = 2 if chosen.quick else chosen.rounds
            contenders = contenders_of(chosen.contender, count, chosen.accelerator)
            seen = compare(contenders, shape, chosen.ranks, count, rounds, chosen.accelerator)
            rows += summarize(name, chosen.ranks, count, seen)
            print(table(rows[-len(seen) :]), flush=True)
    chosen.output.mkdir(parents=True, exist_ok=True)
    (chosen.output / "peers.json").write_text(json.dumps([row._asdict() for row in rows], indent=1))
    (chosen.output / "peers.md").write_text(table(rows))
    plot(rows, chosen.output / "peers.png")
    print(f"{chosen.output / 'peers'}.json, .md and .png")


def contenders_of(chosen: list[str] | None, backwards: int, accelerator: str) -> list[str]:
    """DDP, and the chosen contenders or all that differ with so many backwards."""
    names = CONTENDERS + OTHERWISE[accelerator] if backwards > 1 else CONTENDERS
    return [name for name in names if not chosen or name in ("ddp", *chosen)]


def prepare(accelerator: str = "cpu") -> None:
    """Import everything once: the ranks that are forked share it."""
    os.environ.update(DS_ACCELERATOR=accelerator, OMP_NUM_THREADS="1")
    if accelerator != "cpu":
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import lightning.pytorch  # noqa: F401
    import torch

    import lightning_zeroplus.engine.build  # noqa: F401

    torch.set_num_threads(1)


def compare(
    contenders: list[str], shape: Shape, ranks: int, backwards: int, rounds: int, accelerator: str = "cpu"
) -> dict[str, Seen]:
    """Let the contenders take turns, step by step."""
    import torch.multiprocessing

    # CUDA does not survive a fork.
    context: Any = torch.multiprocessing.get_context("fork" if accelerator == "cpu" else "spawn")
    teams: dict[str, Team] = {}
    for name in contenders:
        job = Job(name, shape, 0, ranks, backwards, WARMUP + rounds, _free_port(), accelerator)
        teams[name] = Team(context, job, _train)
        if accelerator == "cpu":
            teams[name].wait()  # until they are ready for the first step, before the next contender begins
    if accelerator != "cpu":  # whose processes import everything by themselves
        for team in teams.values():
            team.wait()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    wire: dict[str, list[int]] = {name: [] for name in contenders}
    for turn in range(WARMUP + rounds):
        for name, team in teams.items():
            before = _loopback_bytes()
            taken = team.step()
            if turn >= WARMUP:
                seconds[name].append(taken)
                wire[name].append(_loopback_bytes() - before)
    for team in teams.values():
        team.close()
    return {
        name: Seen(
            seconds[name],
            wire[name],
            max(grown for grown, _ in team.last),
            sum(loss for _, loss in team.last) / ranks,
        )
        for name, team in teams.items()
    }


class Team:
    """The processes of one contender, one for each rank.

    Args:
        context: Of ``multiprocessing``.
        job: What rank 0 is to train.
        train: Trains, and takes :class:`Turns` at each step.
    """

    def __init__(self, context: Any, job: Job, train: Callable[[Job, Connection], None]) -> None:
        self._ends: list[Connection] = []
        self._processes = []
        #: What each rank last told: after its last step, its memory in bytes and its loss.
        self.last: list[Any] = []
        for rank in range(job.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=train, args=(job._replace(rank=rank), theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def wait(self) -> list[Any]:
        """Return what each rank tells next.

        Raises:
            SystemExit: If a rank has failed.
        """
        answers = [end.recv() for end in self._ends]
        for answer in answers:
            if isinstance(answer, str):
                raise SystemExit(answer)
        return answers

    def step(self) -> float:
        """Take one step, and return the seconds that the slowest rank took."""
        for end in self._ends:
            end.send(None)
        taken = max(self.wait())
        self.last = self.wait()  # they are ready for the next step, or at the end
        return float(taken)

    def close(self) -> None:
        for process in self._processes:
            process.join(10)
            process.kill()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


class Turns:
    """A process's side of taking turns; ``clock`` tells the seconds that a step takes."""

    def __init__(self, job: Job, end: Connection, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._left, self._end, self._on_gpu = job.steps, end, job.accelerator == "cuda"
        Path("/proc/self/clear_refs").write_text("5")  # forget the highest resident set so far
        self._before = _status("VmRSS")
        self._started = 0.0

    def begin(self) -> None:
        self._wait()
        self._end.send(0.0)
        self._end.recv()
        self._started = self._clock()

    def end(self, loss: Any) -> None:
        self._wait()
        self._end.send(self._clock() - self._started)
        self._left -= 1
        if not self._left:
            self._end.send((self._grown(), float(loss)))

    def _wait(self) -> None:
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()

    def _grown(self) -> int:
        if not self._on_gpu:
            return _status("VmHWM") - self._before
        import torch

        return torch.cuda.max_memory_allocated()


def _train(job: Job, end: Connection) -> None:
    """Train one contender on one rank; does not return."""
    ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)  # it would wait for its turn, and keep its memory
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port), "WORLD_SIZE": str(job.ranks)}
    os.environ.update(rendezvous, RANK=str(job.rank), LOCAL_RANK=str(job.rank), NODE_RANK="0")
    sys.argv = sys.argv[:1]
    try:
        with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence):
            turns = Turns(job, end)
            (_train_deepspeed if job.contender.startswith("deepspeed") else _train_lightning)(job, turns)
    except BaseException as error:
        end.send(f"{job.contender}, rank {job.rank}: {type(error).__name__}: {error}")
    os._exit(0)  # gloo's threads may outlive the interpreter


def _make_net(shape: Shape) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    width = shape.width
    if shape.transformer:
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(shape.layers)]
        return nn.Sequential(*layers)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(shape.layers))
    )


def _batches(job: Job) -> Iterator[Any]:
    import torch

    generator = torch.Generator().manual_seed(job.rank)
    for _ in range(job.steps * job.backwards):
        yield torch.randn(job.shape.rows, TOKENS, job.shape.width, generator=generator)


def _loss(net: Any, batch: Any) -> Any:
    return (net(batch) - batch.flip(-1)).square().mean()


def _adam(net: Any) -> Any:
    import torch

    return torch.optim.AdamW(net.parameters(), lr=1e-3)


def _strategy(job: Job) -> Any:
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    import lightning_zeroplus as zp
    from lightning_zeroplus.strategy.fsdp2.trainer import ZeroPlusFSDPStrategy

    backend = _backend(job)
    if job.contender == "ddp":
        return DDPStrategy(process_group_backend=backend)
    if job.contender == "fsdp2_by_hand":
        return ModelParallelStrategy(job.ranks, 1, process_group_backend=backend)
    _, name, *rest = job.contender.split("_")
    reduction: Any = rest[0] if rest else "auto"
    if name == "fsdp":
        return ZeroPlusFSDPStrategy(
            wrap=lambda module: type(module).__name__ == "TransformerEncoderLayer", reduction=reduction
        )
    return zp.ZeroPlusStrategy(int(name), reduction=reduction)


def _backend(job: Job) -> str:
    return "nccl" if job.accelerator == "cuda" else "gloo"


def _train_lightning(job: Job, turns: Turns) -> None:
    import lightning.pytorch as pl
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _make_net(job.shape)
            self.total = 0.0

        def configure_model(self) -> None:
            if job.contender == "fsdp2_by_hand":
                mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
                for layer in self.net if job.shape.transformer else ():
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def configure_optimizers(self) -> Any:
            return _adam(self)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx % job.backwards == 0:
                turns.begin()

        def training_step(self, batch: Any) -> Any:
            return _loss(self.net, batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % job.backwards == 0:
                turns.end(outputs["loss"] * job.backwards)

    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pl.Trainer(
        accelerator=job.accelerator,
        devices=job.ranks,
        strategy=_strategy(job),
        accumulate_grad_batches=job.backwards,
        max_epochs=1,
        use_distributed_sampler=False,
        **quiet,
    )
    batches: Any = list(_batches(job))
    trainer.fit(Model(), DataLoader(batches, batch_size=None))


def _train_deepspeed(job: Job, turns: Turns) -> None:
    import deepspeed

    from lightning_zeroplus.engine.upstream.shared_memory import without_shared_memory_operator

    with without_shared_memory_operator():
        deepspeed.init_distributed(_backend(job), verbose=False)
    net = _make_net(job.shape)
    config = {
        "train_micro_batch_size_per_gpu": job.shape.rows,
        "gradient_accumulation_steps": job.backwards,
        "zero_optimization": {"stage": int(job.contender[-1])},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # DeepSpeed clips to a norm of 1 otherwise
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=_adam(net), config=config)
    for index, batch in enumerate(_batches(job)):
        if index % job.backwards == 0:
            turns.begin()
        loss = _loss(engine, batch.to(engine.device))
        engine.backward(loss)
        engine.step()
        if (index + 1) % job.backwards == 0:
            turns.end(loss.detach())


def summarize(model: str, ranks: int, backwards: int, seen: dict[str, Seen]) -> list[Row]:
    """Divide by DDP's times, round by round.

    Raises:
        SystemExit: If a contender has come to another loss than DDP.
    """
    ddp = seen["ddp"]
    for name, each in seen.items():
        if not math.isclose(each.loss, ddp.loss, rel_tol=BOUND):
            raise SystemExit(f"{name} comes to the loss {each.loss}, and ddp to {ddp.loss}: they train differently.")
    return [
        Row(
            model,
            ranks,
            backwards,
            name,
            1e3 * statistics.median(each.seconds),
            statistics.median(own / other for own, other in zip(each.seconds, ddp.seconds, strict=True)),
            each.grown / 2**20,
            min(each.wire) / ranks / 2**20,
            each.loss,
        )
        for name, each in seen.items()
    ]


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| model | ranks | backwards | contender | ms | ÷ DDP | peak MiB per rank | MiB sent per rank |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        lines.append(
            f"| {row.model} | {row.ranks} | {row.backwards} | {row.contender} | {row.milliseconds:.1f} |"
            f" {row.to_ddp:.2f} | {row.grown_mib:.0f} | {row.wire_mib:.2f} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """One column per model and number of backwards; from top to bottom time, memory and bytes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = list(dict.fromkeys((row.model, row.backwards) for row in rows))
    quantities = (("to_ddp", "time ÷ DDP"), ("grown_mib", "peak MiB per rank"), ("wire_mib", "MiB sent per rank"))
    size = (1 + 3.2 * len(settings), 7)
    figure, axes = plt.subplots(3, len(settings), figsize=size, squeeze=False, layout="constrained", sharey=True)
    for column, setting in enumerate(settings):
        own = [row for row in rows if (row.model, row.backwards) == setting][::-1]
        for axis, (field, label) in zip(axes[:, column], quantities, strict=True):
            axis.barh([row.contender for row in own], [getattr(row, field) for row in own])
            axis.set_xlabel(label)
        axes[0, column].axvline(1, color="black", linewidth=0.8)
        axes[0, column].set_title(f"{setting[0]}, {setting[1]} backward{'s' * (setting[1] > 1)}")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
