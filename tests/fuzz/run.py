"""Runs a program under a strategy, and by the reference: one process, no Lightning, no ZeRO."""

from __future__ import annotations

import contextlib
import traceback
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zeroplus as zp
from tests.fuzz.model import Batch, Net, batches
from tests.fuzz.program import Program
from tests.programs.state import whole_state
from tests.support.training import trainer

#: Stage, None for FSDP2, and arguments of the strategy.
STRATEGIES: dict[str, tuple[int | None, dict[str, Any]]] = {
    "stage0": (0, {}),
    "stage1": (1, {}),
    "stage2": (2, {"reduction": "backward"}),
    "stage3": (3, {"reduction": "backward"}),
    "stage0_backward": (0, {"reduction": "backward"}),
    "stage1_backward": (1, {"reduction": "backward"}),
    "stage2_step": (2, {"reduction": "step"}),
    "stage3_step": (3, {"reduction": "step"}),
    "stage2_offload": (2, {"offload": "cpu"}),
    "stage3_offload": (3, {"offload": "cpu"}),
    "fsdp": (None, {"reduction": "backward"}),
    "fsdp_step": (None, {"reduction": "step"}),
    "fsdp_wrap": (None, {"reduction": "backward", "wrap": 1}),
}
#: Largest error of a parameter: the norm of its difference from the reference's, over the distance by which the
#: reference has moved it plus a hundredth of its own norm. Both are fp32 and differ in the order of additions only.
#: Rounding a parameter that hardly moves costs 6e-8 / 0.01, in each of up to 5 steps; the optimizers' eps of 1e-2
#: amplifies no rounding. Measured: 1.4e-5. A gradient that is lost, doubled, or of one rank only, costs 1e-2 or more.
BOUND = 5e-5


class Result(NamedTuple):
    """What a program leaves behind."""

    state: dict[str, Tensor]
    #: Whatever it has read on the way: norms of gradients; -1 where there is none.
    read: list[float]


class Outcome(NamedTuple):
    """The comparison of a rank with the reference."""

    error: float
    wrong: list[str]


def train_reference(program: Program, world_size: int) -> Result:
    """Train with the batches of all ranks, and gradients averaged over them."""
    host = _Reference(program, world_size)
    for index, ranks in enumerate(batches(program.seed, program.batches, world_size)):
        host.begin(index, dict(enumerate(ranks)))
        for statement in (*program.before, *program.body):
            statement.run(host)
    return Result({name: param.detach().clone() for name, param in host.net.named_parameters()}, host.read)


class _Reference:
    def __init__(self, program: Program, world_size: int) -> None:
        self.weight = 1.0 / world_size
        self.net = Net(program.model)
        self.optimizer = program.make_optimizer(self.net)
        self.scheduler = program.make_scheduler(self.optimizer)
        self.read: list[float] = []

    def begin(self, index: int, batches: dict[int, Batch]) -> None:
        self.index, self.batches = index, batches
        self.values: dict[str, dict[int, Tensor]] = {}

    def differentiate(self, loss: Tensor, bare: bool, **kwargs: Any) -> None:
        gradient = kwargs.pop("gradient", torch.ones_like(loss))
        loss.backward(gradient * self.weight, **kwargs)

    def torch_optimizer(self) -> Any:
        return self.optimizer

    def clip(self, limit: float, algorithm: str) -> None:
        clip = {"norm": torch.nn.utils.clip_grad_norm_, "value": torch.nn.utils.clip_grad_value_}[algorithm]
        clip([param for group in self.optimizer.param_groups for param in group["params"]], limit)

    def schedule(self) -> None:
        self.scheduler.step()

    def window(self, kind: str, backwards: int) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def whole(self, module: nn.Module) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()


def train(program: Program, strategy: str) -> Result | str:
    """Train on this rank of a pool; the traceback, if an exception is raised.

    The other ranks may wait for this one then: `RankPool` ends them after its time.
    """
    try:
        return _train(program, strategy)
    except Exception:
        return traceback.format_exc()


def _train(program: Program, strategy: str) -> Result:
    stage, kwargs = STRATEGIES[strategy]
    zero = {
        "reduce_bucket_size": program.bucket,
        "stage3_param_persistence_threshold": program.threshold,
        "overlap_comm": program.overlap,
    }
    module = _Module(program)
    made: Any = zp.ZeroPlusFSDPStrategy(**kwargs)
    if stage is not None:
        made = zp.ZeroPlusStrategy(stage=stage, config={"zero_optimization": zero}, **kwargs)
    run = trainer(
        made,
        devices=dist.get_world_size(),
        max_epochs=1,
        use_distributed_sampler=False,
    )
    data = batches(program.seed, program.batches, dist.get_world_size())
    run.fit(module, DataLoader([ranks[dist.get_rank()] for ranks in data], batch_size=None))
    state = whole_state(module.net)
    return Result({name: state[name] for name, _ in module.net.named_parameters()}, module.read)


class _Module(pl.LightningModule):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.program = program
        net = Net(program.model)
        if program.spread:
            self.layers, self.heads = net.layers, net.heads
            vars(self)["net"] = net
        else:
            self.net = net
        self.read: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.index, self.batches = batch_idx, {self.global_rank: batch}
        for statement in self.program.before:
            statement.run(self)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.values: dict[str, dict[int, Tensor]] = {}
        for statement in self.program.body:
            statement.run(self)

    def configure_optimizers(self) -> Any:
        optimizer = self.program.make_optimizer(self.net)
        scheduler = self.program.make_scheduler(optimizer)
        return optimizer if scheduler is None else ([optimizer], [scheduler])

    def differentiate(self, loss: Tensor, bare: bool, **kwargs: Any) -> None:
        loss.backward(**kwargs) if bare else self.manual_backward(loss, **kwargs)

    def torch_optimizer(self) -> Any:
        return self.optimizers()

    def clip(self, limit: float, algorithm: str) -> None:
        self.clip_gradients(self.torch_optimizer(), limit, algorithm)

    def schedule(self) -> None:
        scheduler: Any = self.lr_schedulers()
        scheduler.step()

    def window(self, kind: str, backwards: int) -> AbstractContextManager[Any]:
        strategy: Any = self.trainer.strategy
        match kind:
            case "no_sync":
                return strategy.block_backward_sync()
            case "backwards":
                return strategy.coalesce(backwards=max(backwards, 1)) if backwards else contextlib.nullcontext()
            case "max_bytes":
                return strategy.coalesce(max_bytes=300)
        return strategy.coalesce()

    def whole(self, module: nn.Module) -> AbstractContextManager[Any]:
        gathered: Any = getattr(zp, "gathered", None)
        return contextlib.nullcontext() if gathered is None else gathered(module)


@dataclass(frozen=True)
class Comparison:
    """A program's results beside those of the reference.

    Attributes:
        start: The parameters before the first batch.
        want: The reference's.
    """

    start: dict[str, Tensor]
    want: Result

    @classmethod
    def of(cls, program: Program, world_size: int) -> Comparison:
        """Train the reference."""
        start = {name: param.detach().clone() for name, param in Net(program.model).named_parameters()}
        return cls(start, train_reference(program, world_size))

    def outcome(self, got: Result) -> Outcome:
        """What is wrong with ``got``, and the largest error of a parameter."""
        wrong, largest = [], 0.0
        for name, want in self.want.state.items():
            moved = float((want - self.start[name]).norm())
            error = float((got.state[name] - want).norm()) / (moved + 0.01 * float(want.norm()) + 1e-6)
            largest = max(largest, error)
            if moved == 0 and not torch.equal(got.state[name], want):
                wrong.append(f"{name} has moved, by {error:.1e}, and must not")
            elif moved > 0 and torch.equal(got.state[name], self.start[name]):
                wrong.append(f"{name} has not moved")
            elif not error <= BOUND:
                wrong.append(f"{name} is off by {error:.1e}")
        if len(got.read) != len(self.want.read):
            wrong.append(f"read {len(got.read)} gradients instead of {len(self.want.read)}")
        for number, (mine, theirs) in enumerate(zip(got.read, self.want.read, strict=False)):
            if not abs(mine - theirs) <= BOUND * max(abs(theirs), 0.01):
                wrong.append(f"reading {number} is {mine:.6g} instead of {theirs:.6g}")
        return Outcome(largest, wrong)


def compare(program: Program, answers: list[Result | str]) -> Outcome:
    """Compare every rank with the reference, and the ranks with each other."""
    raised = [f"rank {rank} raised\n{answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
    if raised:
        return Outcome(float("inf"), raised)
    results = [answer for answer in answers if isinstance(answer, Result)]
    comparison = Comparison.of(program, len(results))
    outcomes = [comparison.outcome(result) for result in results]
    wrong = [f"rank {rank}: {text}" for rank, outcome in enumerate(outcomes) for text in outcome.wrong]
    for rank, result in enumerate(results):
        apart = [name for name, tensor in result.state.items() if not torch.equal(tensor, results[0].state[name])]
        wrong += [f"rank {rank} and rank 0 have different {', '.join(apart)}"] if apart else []
    return Outcome(max(outcome.error for outcome in outcomes), wrong)
