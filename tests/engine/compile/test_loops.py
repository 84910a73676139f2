"""Training loops on a model with compiled and skipped frames, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.compile.models import WIDTH, Compiled, Loop, Raw, Spec, batch, build
from tests.engine.compile.test_skipped_frames import ROUNDING
from tests.engine.compile.training import compiled_engine, config, full, train
from tests.support.training import Classifier, fit, weights, zero_plus

MIXED = Spec(("compiled", "loop", "again", "raw", "first"))
Forward = Callable[[int], Tensor]
Backward = Callable[..., None]


def several(loss: Forward, backward: Backward, step: int) -> None:
    for part in range(3):
        backward(loss(10 * step + part) / 3)


def retained(loss: Forward, backward: Backward, step: int) -> None:
    value = loss(step)
    backward(value, retain_graph=True)
    backward(2 * value)


def forwards_first(loss: Forward, backward: Backward, step: int) -> None:
    first, second = loss(10 * step), loss(10 * step + 1)
    backward(second)
    backward(first)


def one_backward_for_two(loss: Forward, backward: Backward, step: int) -> None:
    backward(loss(10 * step) + loss(10 * step + 1))


def abandoned(loss: Forward, backward: Backward, step: int) -> None:
    loss(10 * step)  # no backward
    with torch.no_grad():
        loss(10 * step + 1)
    with torch.inference_mode():
        loss(10 * step + 2)
    backward(loss(10 * step + 3))


LOOPS = (several, retained, forwards_first, one_backward_for_two, abandoned)


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.thorough), 2, 3])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops(ranks2: Any, loop: Any, stage: int) -> None:
    for outcome in ranks2.run(train, partial(build, MIXED), stage, loop):
        assert outcome.error <= ROUNDING and not outcome.still, outcome
        assert outcome.forward_end == outcome.backward_end == 0, outcome


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("stage", [2, 3])
def test_one_reduction_per_step(ranks2: Any, stage: int) -> None:
    for outcome in ranks2.run(partial(train, reduction="step"), partial(build, MIXED), stage, several):
        assert outcome.error <= ROUNDING and not outcome.still, outcome


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_inductor_and_the_default_schedule(ranks2: Any, stage: int) -> None:
    """Seven steps: at the fifth, stage 3 is compiled anew, with prefetching and selective gathering."""
    run = partial(train, backend="inductor", steps=7)
    for outcome in ranks2.run(run, partial(build, Spec(("compiled", "loop"))), stage, timeout=180):
        assert outcome.error <= 5 * ROUNDING and not outcome.still, outcome


def _profiles() -> list[tuple[bool, bool]]:
    from deepspeed.compile import backend
    from deepspeed.compile.profilers.graph_profile import is_profile_incomplete

    model = build(Spec(("compiled", "loop", "raw")))
    with compiled_engine(model, 3) as engine:
        for step in range(7):
            engine.optimizer.zero_grad()
            engine.backward(engine(*batch(step, torch.distributed.get_rank())))
            engine.step()
        return [
            (
                each.fwd_mem_complete and not is_profile_incomplete(each.fwd_graph),
                each.bwd_graph is not None and each.bwd_mem_complete and not is_profile_incomplete(each.bwd_graph),
            )
            for each in backend.profiling_results.values()
        ]


def test_profiles_are_complete_in_forward_and_backward(ranks2: Any) -> None:
    """Of the default schedule's last passes, prefetching and selective gathering, on a model with skipped frames."""
    for profiles in ranks2.run(_profiles):
        assert profiles and all(forward and backward for forward, backward in profiles), profiles


def _reported() -> list[str]:
    import logging

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_zeroplus.engine.compile.session")
    logger.addHandler(handler)
    try:
        train(partial(build, Spec(("compiled", "loop"))), 3)
    finally:
        logger.removeHandler(handler)
    return [message for message in messages if message.startswith("These modules ran in Python")]


def test_skipped_modules_are_named_once(ranks2: Any) -> None:
    ranks2.close()  # new ranks: DeepSpeed's own engines leave their linear layer in the process, and it breaks graphs
    first, second = ranks2.run(_reported)
    assert len(first) == 1 and not second
    assert "blocks.1.layers.0, blocks.1.layers.1" in first[0] and "graph_break()" in first[0]


class Checkpointed(nn.Module):
    """Activation checkpointing around a skipped and a compiled frame."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.loop, self.raw, self.compiled = Loop(), Raw(), Compiled()
        self.reentrant = reentrant

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()  # else the first reentrant checkpoint gives an output without gradient
        for block in (self.loop, self.raw, self.compiled):
            torch._dynamo.graph_break()
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(x, y)


def _checkpointed(reentrant: bool) -> nn.Module:
    torch.manual_seed(0)
    return Checkpointed(reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(ranks2: Any, reentrant: bool) -> None:
    for outcome in ranks2.run(train, partial(_checkpointed, reentrant), 3):
        assert outcome.error <= ROUNDING and not outcome.still, outcome
        assert outcome.backward_end == 0, outcome


class Failing(nn.Module):
    """Raises in the middle of a skipped frame, if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build(Spec(("loop", "compiled", "raw")))
        self.fails = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.net(x, y)
        torch._dynamo.graph_break()
        if self.fails:
            raise RuntimeError("planned")
        return loss


def _after_an_exception() -> tuple[int, float]:
    torch.manual_seed(0)
    model, expected = Failing(), Failing()
    expected.load_state_dict(model.state_dict())
    rank = torch.distributed.get_rank()
    with compiled_engine(model, 3) as engine:
        assert engine.compilation is not None
        engine.backward(engine(*batch(0, rank)))
        engine.optimizer.zero_grad()
        model.fails = True
        with pytest.raises(RuntimeError, match="planned"):
            engine(*batch(0, rank))
        model.fails = False
        engine(*batch(1, rank))
        live = engine.compilation.meter.live()
        engine.backward(engine(*batch(0, rank)))
        engine.step()
        found = [full(param) for param in model.parameters()]
    for other in range(torch.distributed.get_world_size()):
        (expected(*batch(0, other)) / 2).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    error = max(float((a - b).abs().max()) for a, b in zip(found, expected.parameters(), strict=True))
    return live, error


def test_an_exception_in_a_forward(ranks2: Any) -> None:
    for _, error in ranks2.run(_after_an_exception):
        assert error <= ROUNDING


def _shapes_and_modes() -> tuple[list[int], list[int]]:
    from torch._dynamo.utils import counters

    def graphs(skipping: bool) -> list[int]:
        model = build(Spec(("compiled", "loop" if skipping else "compiled")))
        found = []
        rank = torch.distributed.get_rank()
        # The default schedule compiles once more, at step 5.
        with compiled_engine(
            model, 3 if skipping else 2, schedule=[(0, ["zero3_compile"])] if skipping else None
        ) as engine:
            for epoch in range(3):
                before = counters["stats"]["unique_graphs"]
                for rows in (6, 9):
                    engine.optimizer.zero_grad()
                    engine.backward(engine(*batch(epoch, rank, rows)))
                    engine.step()
                with torch.no_grad():
                    engine(*batch(epoch, rank, 6))
                found.append(counters["stats"]["unique_graphs"] - before)
        return found

    return graphs(True), graphs(False)


def test_nothing_is_compiled_after_the_first_epoch(ranks2: Any) -> None:
    for with_skipped, without in ranks2.run(_shapes_and_modes):
        assert with_skipped[1:] == without[1:] == [0, 0], (with_skipped, without)


def _counts(stage: int) -> int:
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    train(partial(build, MIXED), stage, steps=3)
    return counters["stats"]["unique_graphs"] - before


def test_partitioning_costs_no_compilation(ranks2: Any) -> None:
    """As many graphs at stage 3, where skipped frames gather their parameters, as at stage 2, where they have them."""
    assert ranks2.run(_counts, 3) == ranks2.run(_counts, 2)


def _refusals() -> list[str]:
    import deepspeed

    from lightning_zeroplus.engine.build import build_engine

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    messages = []
    for stage, backend, schedule in ((0, "eager", None), (2, "aot_eager", None), (2, "eager", [(0, ["zero4"])])):
        model = nn.Linear(WIDTH, WIDTH)
        engine = build_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), config(stage))
        with pytest.raises(ValueError) as error:
            engine.compile(backend=backend, schedule=schedule)
        messages.append(str(error.value))
        engine.backward(engine(torch.randn(2, WIDTH)).sum())  # nothing has been changed
        engine.step()
        engine.destroy()
    return messages


def test_refusals(ranks2: Any) -> None:
    for stage, backend, schedule in ranks2.run(_refusals):
        assert "stage 1, 2 or 3, not 0" in stage
        assert "'aot_eager'" in backend
        assert "unknown pass 'zero4' at step 0" in schedule


class GatheredByHand(nn.Module):
    """A skipped frame that reads a weight within the user's own ``GatheredParameters``, and uses it after it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(2):
            torch._dynamo.graph_break()
            if hasattr(self.weight, "ds_id"):
                from deepspeed.runtime.zero.partition_parameters import GatheredParameters

                with GatheredParameters([self.weight]):
                    assert self.weight.shape == (8, 8)
                    x = torch.tanh(x @ self.weight)
            else:
                x = torch.tanh(x @ self.weight)
            x = x @ self.weight
        return self.last(x).square().mean()


def _gathered_by_hand() -> float:
    torch.manual_seed(0)
    model, expected = GatheredByHand(), GatheredByHand()
    expected.load_state_dict(model.state_dict())
    inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    with compiled_engine(model, 3) as engine:
        engine.optimizer.zero_grad()
        engine.backward(engine(inputs[torch.distributed.get_rank()]))
        engine.step()
        found = [full(param) for param in model.parameters()]
    for x in inputs:
        (expected(x) / 2).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    return max(float((a - b).abs().max()) for a, b in zip(found, expected.parameters(), strict=True))


def test_parameters_that_the_user_gathers(ranks2: Any) -> None:
    assert max(ranks2.run(_gathered_by_hand)) <= ROUNDING


class _Counts(Classifier):
    """Its network is an ``nn.Sequential``, of which Dynamo by itself compiles nothing."""

    graphs = 0

    def on_train_end(self) -> None:
        engine: Any = self.trainer.strategy.model
        region = self.net._compiled_call_impl
        assert region is not None and engine.compilation is not None
        self.graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _sequential(stage: int | None) -> tuple[Tensor, int]:
    torch._dynamo.utils.counters.clear()
    if stage is None:
        return weights(fit("ddp", Classifier(scheduler=None), max_epochs=1)), 0
    module = _Counts(scheduler=None)
    fit(zero_plus(stage, compile={"backend": "eager"}), module, max_epochs=1)
    return weights(module), module.graphs


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_modules_of_torch_are_compiled(ranks2: Any, stage: int) -> None:
    for (ours, graphs), (ddp, _) in zip(ranks2.run(_sequential, stage), ranks2.run(_sequential, None), strict=True):
        torch.testing.assert_close(ours, ddp, rtol=0, atol=1e-6)
        assert graphs >= 1
