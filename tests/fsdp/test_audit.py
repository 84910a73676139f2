"""GradientAudit under FSDP2: silent where gradients are right, loud where one is lost, doubled or misplaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from lightning_zeroplus.callbacks.audit.sharded import sharded_parameters
from lightning_zeroplus.callbacks.audit.shares import first_row, optimizer_shares
from lightning_zeroplus.callbacks.gradient_audit import GradientAudit
from lightning_zeroplus.weight_grads.convert import defer_weight_grads
from lightning_zeroplus.weight_grads.store import WeightGradStore
from tests.fsdp.training import DIM, Block, ManualTask, Task, loader, ours, plain, trainer
from tests.support.audited import Audit

#: fp32: the order of a few additions. bf16: relative to the summed norms of the raw gradients.
BOUNDS = {"fp32": 1e-6, "bf16": 1.5e-2}


class Odd(nn.Module):
    """Tied, frozen and unused parameters; 7 rows for two ranks, and one row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twin = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)
        self.twin.weight = self.first.weight
        self.blocks = nn.ModuleList([Block(), Block()])
        self.seven, self.back = nn.Linear(DIM, 7), nn.Linear(7, DIM)
        self.row = nn.Parameter(torch.ones(1, DIM))
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        self.unused, self.last = nn.Linear(DIM, 4), nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        x = self.twin(x) + self.back(torch.tanh(self.seven(x))) * self.row
        return self.last(self.frozen(x))


TRAINABLE = {
    "first.weight",
    "first.bias",
    *(f"blocks.{i}.{part}.{kind}" for i in (0, 1) for part in ("up", "down") for kind in ("weight", "bias")),
    *(f"{part}.{kind}" for part in ("seven", "back", "unused", "last") for kind in ("weight", "bias")),
    "row",
}


class Manual(ManualTask):
    """Four backwards; ``script`` may replace how."""

    def __init__(self) -> None:
        super().__init__(make_net=Odd)

    def backward_all(self, batch: Any) -> None:
        for chunk in self.chunks(batch):
            self.manual_backward(self.loss(chunk) / self.backwards)

    def before_step(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.backward_all(batch)
        self.before_step()
        self.optimizers().step()
        self.optimizers().zero_grad()


class Automatic(Task):
    def __init__(self) -> None:
        super().__init__(make_net=Odd)


class Windows(Manual):
    window: dict[str, Any] = {}

    def backward_all(self, batch: Any) -> None:
        with self.trainer.strategy.coalesce(**self.window):
            super().backward_all(batch)


class Announced(Windows):
    window = {"backwards": 4}


class Bounded(Windows):
    window = {"max_bytes": 5000}


class NoSync(Manual):
    def backward_all(self, batch: Any) -> None:
        *held, last = self.chunks(batch)
        with self.trainer.strategy.block_backward_sync():
            for chunk in held:
                self.manual_backward(self.loss(chunk) / 4)
        self.manual_backward(self.loss(last) / 4)


class ClipsNorm(Manual):
    def before_step(self) -> None:
        self.clip_gradients(self.optimizers(), gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class ClipsValue(Manual):
    def before_step(self) -> None:
        self.clip_gradients(self.optimizers(), gradient_clip_val=0.001, gradient_clip_algorithm="value")


class Closure(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        def closure() -> Tensor:
            self.optimizers().zero_grad()
            self.backward_all(batch)
            return torch.zeros(())

        self.optimizers().step(closure)


class Discards(Manual):
    """A first pass whose gradients are dropped."""

    def backward_all(self, batch: Any) -> None:
        super().backward_all(batch)
        self.optimizers().zero_grad()
        super().backward_all(batch)


class Defers(Manual):
    def __init__(self) -> None:
        super().__init__()
        assert len(defer_weight_grads(self, "net.blocks.*")) == 4


class DefersInWindows(Defers, Windows):
    pass


class DefersAnnounced(Defers, Announced):
    pass


class DefersAndDiscards(Defers, Discards):
    """What the store drops is never computed."""


class Flushes(Defers, Windows):
    """A schedule of the user's: weight gradients between backwards."""

    def backward_all(self, batch: Any) -> None:
        with self.trainer.strategy.coalesce():
            for chunk in self.chunks(batch):
                self.manual_backward(self.loss(chunk) / 4)
                assert self.trainer.strategy.weight_grads.flush() == 4


class ByHand(Manual):
    """FSDP2 as its users write it: the last of four backwards reduces."""

    fsdp: dict[str, Any] = {}
    checkpoints = False

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for index, block in enumerate(self.net.blocks):
            self.net.blocks[index] = checkpoint_wrapper(block) if self.checkpoints else block
            fully_shard(self.net.blocks[index], mesh=mesh, **self.fsdp)
        fully_shard(self.net, mesh=mesh, **self.fsdp)

    def backward_all(self, batch: Any) -> None:
        for index, chunk in enumerate(self.chunks(batch)):
            self.net.set_requires_gradient_sync(index == 3)
            self.manual_backward(self.loss(chunk) / 4)


class KeepsGathered(ByHand):
    fsdp = {"reshard_after_forward": False}


class Checkpoints(ByHand):
    checkpoints = True


class Offloads(ByHand):
    fsdp = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


class MixedByHand(ByHand):
    fsdp = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


class LowByHand(ByHand):
    """Computed in fp32, reduced in bf16."""

    fsdp = {"mp_policy": MixedPrecisionPolicy(None, torch.bfloat16)}


class ClipsByHand(ByHand, ClipsNorm):
    pass


class Case(NamedTuple):
    """A loop that is right, and the dtypes on a gradient's way."""

    task: Callable[[], Any]
    strategy: Callable[..., Any] = ours
    arguments: dict[str, Any] = {}
    trainer: dict[str, Any] = {}
    way: tuple[str, str, str] = ("fp32", "fp32", "fp32")
    backwards: int = 4


RIGHT = {
    "backward": Case(Manual),
    "step": Case(Manual, arguments={"reduction": "step"}),
    "one unit": Case(Manual, arguments={"wrap": None}),
    "window": Case(Windows),
    "announced": Case(Announced),
    "bounded": Case(Bounded),
    "no_sync": Case(NoSync),
    "clip norm": Case(ClipsNorm),
    "clip value": Case(ClipsValue, arguments={"reduction": "step"}),
    "closure": Case(Closure),
    "discards": Case(Discards, arguments={"reduction": "step"}),
    "replicated": Case(Windows, arguments={"replicate_size": 2}),
    "offload": Case(ClipsNorm, arguments={"offload": "cpu"}),
    "checkpointing": Case(Windows, arguments={"activation_checkpointing": Block}),
    "bf16-mixed": Case(Windows, trainer={"precision": "bf16-mixed"}, way=("fp32", "fp32", "fp32")),
    "bf16-true": Case(Manual, trainer={"precision": "bf16-true"}, way=("fp32", "fp32", "bf16")),
    "bf16 all the way": Case(Manual, ours, {"reduce_dtype": None}, {"precision": "bf16-true"}, ("bf16",) * 3),
    "deferred": Case(Defers),
    "deferred, window": Case(DefersInWindows, trainer={"precision": "bf16-mixed"}),
    "deferred, announced": Case(DefersAnnounced, arguments={"activation_checkpointing": Block}),
    "deferred, discards": Case(DefersAndDiscards, arguments={"reduction": "step"}),
    "deferred, flushed": Case(Flushes, arguments={"reduction": "step"}),
    "automatic": Case(Automatic, trainer={"gradient_clip_val": 0.05}, backwards=1),
    "accumulate": Case(Automatic, trainer={"accumulate_grad_batches": 3}, backwards=3),
    "accumulate, step": Case(
        Automatic, arguments={"reduction": "step"}, trainer={"accumulate_grad_batches": 3}, backwards=3
    ),
    "by hand": Case(ByHand, plain),
    "by hand, gathered": Case(KeepsGathered, plain),
    "by hand, checkpoints": Case(Checkpoints, plain),
    "by hand, offload": Case(Offloads, plain),
    "by hand, clip": Case(ClipsByHand, plain),
    "by hand, bf16": Case(MixedByHand, plain, way=("bf16", "fp32", "fp32")),
    "by hand, bf16 reduced": Case(LowByHand, plain, way=("fp32", "bf16", "fp32")),
}


def _fit(case: Case, mutation: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Audit:
    """Fit three steps under an audit."""
    auditor, error = GradientAudit(steps=3), None
    task = case.task()
    run = trainer(case.strategy(**case.arguments), callbacks=[auditor], max_steps=3, **case.trainer)
    with mutation():
        try:
            run.fit(task, loader())
        except RuntimeError as raised:
            if type(raised).__name__ != "GradientMismatchError":
                raise
            error = str(raised)
    return Audit(auditor.results, auditor.audited_steps, error)


def _check_right(case: Case, first: Audit, second: Audit) -> None:
    assert first.error is None
    assert repr(first) == repr(second), "all ranks know the same"
    assert first.steps == 3 and len(first.results) == 3 * len(TRAINABLE)
    assert {result.name.removeprefix("net.") for result in first.results} == TRAINABLE
    for result in first.results:
        if "unused" in result.name:
            assert (result.backwards, result.dtypes, result.error) == ((0, 0), (), 0.0)
            continue
        way = case.way
        if case.strategy is plain and hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes"):
            way = (way[1], *way[1:])  # from torch 2.15 on FSDP2 lets autograd cast
        assert result.backwards == (case.backwards,) * 2 and result.dtypes == way, result
        assert result.error <= max(BOUNDS[dtype] for dtype in case.way), result


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", RIGHT)
def test_right_gradients_pass(ranks2: Any, name: str) -> None:
    _check_right(RIGHT[name], *ranks2.run(_fit, RIGHT[name]))


# -- what comes late --------------------------------------------------------------------------------------------------


class Unfreezes(Automatic):
    """A layer is unfrozen after the first step. Then validation leaves the root gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.net.seven.requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        self.net.seven.requires_grad_()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _unfreezes(validation: int) -> Audit:
    auditor = GradientAudit(steps=3)
    run = trainer(ours(), callbacks=[auditor], max_steps=3, val_check_interval=1, limit_val_batches=validation)
    run.fit(Unfreezes(), loader(), loader(64))
    return Audit(auditor.results, auditor.audited_steps, None)


@pytest.mark.parametrize("validation", [0, 1])
def test_parameters_that_are_unfrozen_are_audited(ranks2: Any, validation: int) -> None:
    for outcome in ranks2.run(_unfreezes, validation):
        names = [{result.name for result in outcome.results if result.step == step} for step in range(3)]
        assert names[1] - names[0] == {"net.seven.weight", "net.seven.bias"} and names[1] == names[2]
        assert outcome.steps == 3 and outcome.worst <= BOUNDS["fp32"]
        assert all(result.backwards == (1, 1) for result in outcome.results if "unused" not in result.name)


class TwoOptimizers(Manual):
    """Each steps with its own gradients; what the other's backward has left is dropped."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.net.blocks, self.net.last)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.backward_all(batch)
            optimizer.step()
            self.zero_grad()


def test_each_of_two_optimizers_has_its_own_gradients(ranks2: Any) -> None:
    for outcome in ranks2.run(_fit, Case(TwoOptimizers, arguments={"wrap": nn.Linear})):
        assert outcome.error is None and outcome.worst <= BOUNDS["fp32"]
        sizes = [len([result for result in outcome.results if result.step == step]) for step in range(outcome.steps)]
        assert sizes[:2] == [8, 2] and {result.backwards for result in outcome.results} == {(4, 4)}


def _offsets() -> list[tuple[int, int, int]]:
    """Numbers in place of the weights tell where a share lies."""
    net = Odd()
    for param in net.parameters():
        param.data = torch.arange(param.numel(), dtype=torch.float32).view_as(param)
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    places = []
    for param in net.parameters():
        share = optimizer_shares([torch.optim.SGD([param])])[id(param)]
        local = param.to_local().flatten()
        assert share.numel == local.numel() and share.offset == 0
        assert torch.equal(local, torch.arange(share.start, share.start + share.numel, dtype=torch.float32))
        places.append((share.start, share.numel, param.numel()))
    return places


def test_shares_lie_where_fsdp2_has_put_them(ranks2: Any) -> None:
    for first, second in zip(*ranks2.run(_offsets), strict=True):
        assert first[0] == 0 and second[0] == first[1] and first[1] + second[1] == first[2]
    assert (DIM, 0, DIM) in ranks2.run(_offsets)[1], "the second rank has nothing of the one row"


@pytest.mark.parametrize("rows", range(1, 10))
@pytest.mark.parametrize("ranks", range(1, 6))
def test_rows_are_shared_out_in_chunks(rows: int, ranks: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(ranks)]
    chunks += [[]] * (ranks - len(chunks))
    assert [first_row(rows, ranks, rank) for rank in range(ranks)] == [chunk[0] if chunk else rows for chunk in chunks]


# -- wrong ones are found ---------------------------------------------------------------------------------------------


def _units(module: nn.Module) -> list[FSDPModule]:
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


class LosesOne(ByHand):
    """Steps before the last backward is reduced."""

    def backward_all(self, batch: Any) -> None:
        for index, chunk in enumerate(self.chunks(batch)):
            self.net.set_requires_gradient_sync(index == 2)
            self.manual_backward(self.loss(chunk) / 4)


class LosesADiscard(ByHand):
    """``zero_grad()`` does not see what is not reduced: FSDP2 keeps it, DDP would not."""

    def backward_all(self, batch: Any) -> None:
        self.net.set_requires_gradient_sync(False)
        self.manual_backward(self.loss(batch))
        self.optimizers().zero_grad()
        super().backward_all(batch)


class FlushesLate(ByHand):
    """Weight gradients that are computed after their unit has been reduced, which is FSDP2's silent trap."""

    def __init__(self) -> None:
        super().__init__()
        self.store = WeightGradStore()
        defer_weight_grads(self, "net.blocks.*", self.store)

    def backward_all(self, batch: Any) -> None:
        with self.store.defer():
            super().backward_all(batch)
        self.store.flush()


class Doubles(Manual):
    """The first gradient of one leaf is counted twice, after the audit has seen it."""

    def on_train_start(self) -> None:
        self.left = 1
        self.net.last.unshard()  # as a unit of its own
        self.net.last.weight.register_post_accumulate_grad_hook(self.double)
        self.net.last.reshard()

    def double(self, leaf: Tensor) -> None:
        if self.left:
            self.left -= 1
            leaf.grad.mul_(2)


class ForgetsTheMean(Manual):
    def on_train_start(self) -> None:
        for unit in _units(self):
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no other
            unit.set_gradient_divide_factor(1.0)


class _Reduces:
    """A reduce-scatter of the user's, by FSDP2's public means."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, self.change(input_tensor), op=op, group=group)

    def change(self, tensor: Tensor) -> Tensor:
        return tensor


class _SwapsShards(_Reduces):
    def change(self, tensor: Tensor) -> Tensor:
        return tensor.roll(tensor.numel() // 2)


class _Rounds(_Reduces):
    def change(self, tensor: Tensor) -> Tensor:
        return tensor.bfloat16().float()


class Reduces(Manual):
    reduces: Callable[[], _Reduces] = _Reduces

    def on_train_start(self) -> None:
        for unit in _units(self):
            unit.set_custom_reduce_scatter(self.reduces())


class SwapsShards(Reduces):
    reduces = _SwapsShards


class Rounds(Reduces):
    reduces = _Rounds


class Uncovered(ManualTask):
    """A parameter that no ``fully_shard`` covers: nobody averages its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def loss(self, batch: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(self.head(self.net(batch[0])), batch[1])


class HidesItsGradient(Manual):
    """A hand-made clipping of each rank's own part."""

    def before_step(self) -> None:
        for param in self.parameters():
            if param.grad is not None:
                param.grad.to_local().clamp_(-1e-4, 1e-4)


class Poisons(Manual):
    """A NaN in the part of one rank."""

    def before_step(self) -> None:
        if dist.get_rank() == 1:
            self.net.last.weight.grad.to_local()[0, 0] = torch.nan


@contextmanager
def _no_clipping() -> Iterator[None]:
    with patch.object(Precision, "clip_grad_by_norm", lambda *args, **kwargs: None):
        yield


@contextmanager
def _clipping_by_the_norm_of_a_shard() -> Iterator[None]:
    def clip(plugin: Any, optimizer: Any, limit: float) -> None:
        grads = [p.grad.to_local() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.mul_(min(1.0, limit / float(norm)))

    with patch.object(Precision, "clip_grad_by_norm", clip):
        yield


WRONG: dict[str, tuple[Case, Callable[[], AbstractContextManager[Any]], str]] = {
    "lost": (Case(LosesOne, plain), nullcontext, "after 4 backwards"),
    "not dropped": (Case(LosesADiscard, plain), nullcontext, "after 4 backwards"),
    "flushed late": (Case(FlushesLate, plain), nullcontext, "4 of 19 parameters differ, most of all 'net.blocks."),
    "doubled": (Case(Doubles, arguments={"wrap": nn.Linear}), nullcontext, "1 of 19 parameters differ"),
    "doubled in a window": (
        Case(Doubles, arguments={"wrap": nn.Linear, "reduction": "step"}),
        nullcontext,
        "most of all 'net.last.weight'",
    ),
    "not averaged": (Case(ForgetsTheMean), nullcontext, "All gradients are 2 times the expected ones"),
    "not averaged, bf16": (Case(ForgetsTheMean, trainer={"precision": "bf16-mixed"}), nullcontext, "are 2 times"),
    "not clipped": (Case(ClipsNorm), _no_clipping, "times the expected ones"),
    "clipped by shards": (Case(ClipsNorm), _clipping_by_the_norm_of_a_shard, "17 of 19 parameters differ"),
    "clipped by hand": (Case(HidesItsGradient), nullcontext, "differ"),
    "not a number": (Case(Poisons), nullcontext, "1 of 19 parameters differ, most of all 'net.last.weight', by inf"),
    "not a number, replicated": (
        Case(Poisons, arguments={"replicate_size": 2}),
        nullcontext,
        "1 of 19 parameters differ, most of all 'net.last.weight', by inf",
    ),
    "another rank's shard": (Case(SwapsShards), nullcontext, "17 of 19 parameters differ"),
    "rounded": (Case(Rounds), nullcontext, "parameters differ"),
    "covered by no unit": (Case(Uncovered, plain), nullcontext, "2 of 14 parameters differ, most of all 'head."),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradients_are_found(ranks2: Any, name: str) -> None:
    case, mutation, message = WRONG[name]
    first, second = ranks2.run(_fit, case, mutation)
    assert first.error is not None and message in first.error
    assert repr(first) == repr(second), "all ranks raise, with the same words"


def test_the_ways_to_be_wrong_are_right_without_their_defect(ranks2: Any) -> None:
    for outcome in ranks2.run(_fit, Case(Reduces)):
        assert outcome.error is None and outcome.worst <= BOUNDS["fp32"]


def test_an_error_is_as_large_with_replicas_as_with_shards(ranks2: Any) -> None:
    shards, replicas = (
        ranks2.run(_fit, Case(ForgetsTheMean, arguments={"replicate_size": size}))[0] for size in (1, 2)
    )
    errors = [{result.name: result.error for result in outcome.results} for outcome in (shards, replicas)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-4) and shards.worst > 0.1


# -- refusals and ends ------------------------------------------------------------------------------------------------


class ShardsColumns(ByHand):
    fsdp = {"shard_placement_fn": lambda param: Shard(1 if param.ndim == 2 and param.shape[1] % 2 == 0 else 0)}


class ParallelizesByHand(Manual):
    def configure_model(self) -> None:
        layer, mesh = self.net.last, self.device_mesh["data_parallel"]
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))


class Replicates(Manual):
    """Of a parameter that FSDP2 has sharded over one mesh dimension and another parallelism has not."""

    def configure_model(self) -> None:
        distribute_module(self.net.last, self.device_mesh["tensor_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def _refused(case: Case, hidden: str | None = None) -> tuple[str, bool]:
    task = case.task()
    run = trainer(case.strategy(**case.arguments), callbacks=[GradientAudit()])
    with patch(hidden, int) if hidden else nullcontext():
        try:
            run.fit(task, loader())
        except MisconfigurationException as error:
            return str(error), not task.losses and run.global_step == 0
    return "nothing raised", False


@pytest.mark.parametrize(
    ("case", "hidden", "message"),
    [
        (Case(ShardsColumns, plain), None, "(Shard(dim=1),): it supports `fully_shard` without"),
        (Case(ParallelizesByHand, plain), None, "'net.last.weight', a DTensor with the placements (Shard(dim=0),)"),
        (
            Case(Replicates, arguments={"tensor_parallel_size": 2}),
            None,
            "'net.last.weight', a DTensor with the placements (Shard(dim=0), Replicate())",
        ),
        (Case(Manual), f"{sharded_parameters.__module__}.MixedPrecisionPolicy", "cannot find the dtype in which FSDP2"),
    ],
)
def test_what_is_not_handled_is_refused_before_training(
    ranks2: Any, case: Case, hidden: str | None, message: str
) -> None:
    for said, untouched in ranks2.run(_refused, case, hidden):
        assert message in said and untouched


def _left() -> list[int]:
    counts = []

    class Looks(Manual):
        def on_train_batch_end(self, *args: Any) -> None:
            leaves = [leaf for unit in self.trainer.strategy._gradients.units.all for leaf in unit.params]
            counts.append(sum(len(leaf._backward_hooks or {}) for leaf in leaves))

    task = Looks()
    auditor = GradientAudit(steps=1)
    trainer(ours(), callbacks=[auditor], max_steps=2).fit(task, loader())
    assert auditor.finished and auditor._sharded == {} and auditor._steppers == []
    return counts


def test_nothing_is_left_behind(ranks2: Any) -> None:
    assert ranks2.run(_left) == [[0, 0]] * 2
