"""Stages 2 and 3 on gloo: other collectives than upstream's, and the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partition_parameters, stage3, stage_1_and_2
from torch import Tensor, nn

from lightning_zeroplus.engine.build import build_engine
from lightning_zeroplus.engine.families.zero3_overrides import Zero3Overrides
from lightning_zeroplus.engine.gathering import gathers, linear, on_gloo
from lightning_zeroplus.gradients.ranks import gloo


class Net(nn.Module):
    """Weights that persist at stage 3 and one that does not, an odd size, and a layer without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 30), nn.GELU(), nn.Linear(30, 7), nn.LayerNorm(7))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs).square().mean()


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("upstream's collective")


@contextmanager
def _calls() -> Iterator[dict[str, int]]:
    """Count our collectives; upstream's raise."""
    counts = {"gathers": 0, "reductions": 0, "in place": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name, value in (
            (gloo, "Gather", counted("gathers", gloo.Gather)),
            (gloo.reduction, "reduce_parts", counted("reductions", gloo.reduction.reduce_parts)),
            (gloo.reduction, "add_parts", counted("in place", gloo.reduction.add_parts)),
            (on_gloo, "_upstream", _refuse),
            (partition_parameters.Init, "_allgather_params_coalesced", _refuse),
            (stage3, "reduce_scatter_coalesced", _refuse),
            (stage_1_and_2.DeepSpeedZeroOptimizer, "buffered_reduce_fallback", _refuse),
            (stage_1_and_2.DeepSpeedZeroOptimizer, "average_tensor", _refuse),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield counts


def _trained(stage: int, as_it_is: bool, large: int = on_gloo._LARGE) -> tuple[Tensor, dict[str, int], bool]:
    """The weights after three steps of two backwards, the collectives of the last, and whether modules are hooked.

    If not ``as_it_is``, with upstream's collectives, hooks, linear layer and sums. Weights of ``large`` elements are
    gathered by themselves.
    """
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
    net = Net()
    zero = {"stage": stage, "reduce_bucket_size": 150, "stage3_param_persistence_threshold": 100}
    with ExitStack() as stack:
        stack.enter_context(patch.object(on_gloo, "_LARGE", large))
        for owner, name in (
            (gloo, "suits"),
            (gathers, "passes_on"),
            (gathers, "stays_whole"),
            (gathers, "stays"),
            (linear, "_stays_whole"),
            (Zero3Overrides, "_adds_together"),
        ):
            if not as_it_is:
                stack.enter_context(patch.object(owner, name, lambda *_: False))
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
        engine = build_engine(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), config)
        for step in range(3):
            with _calls() if as_it_is and step == 2 else nullcontext({}) as counts:
                for index in range(2):
                    generator = torch.Generator().manual_seed(10 * step + 2 * index + dist.get_rank())
                    engine.backward(engine(torch.randn(4, 8, generator=generator)))
                engine.step()
                engine.optimizer.zero_grad()
        hooked = any(each._forward_hooks for each in (net.layers, net.layers[1], net.layers[3]))
        with partition_parameters.GatheredParameters(list(net.parameters()), enabled=stage == 3):
            flat = torch.cat([param.detach().clone().flatten() for param in net.parameters()])
        engine.destroy()
    return flat, counts, hooked


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_weights_have_upstreams_bits(ranks2: Any, stage: int) -> None:
    for (own, *_), (other, *_) in zip(
        ranks2.run(_trained, stage, True), ranks2.run(_trained, stage, False), strict=True
    ):
        assert torch.equal(own, other)


@pytest.mark.parametrize("large", [1, 200])
def test_weights_that_are_gathered_alone_have_the_same_bits(ranks2: Any, large: int) -> None:
    for (own, *_), (other, *_) in zip(
        ranks2.run(_trained, 3, True, large), ranks2.run(_trained, 3, False), strict=True
    ):
        assert torch.equal(own, other)


def _param(number: int, numel: int) -> Any:
    return SimpleNamespace(ds_id=number, ds_numel=numel, ds_tensor=torch.zeros(1), ds_process_group=None)


@pytest.mark.parametrize(("forward", "expected"), [(True, [[0, 3], [1], [2]]), (False, [[3, 0], [2], [1]])])
def test_large_weights_have_a_collective_each_in_the_order_of_their_use(
    monkeypatch: pytest.MonkeyPatch, forward: bool, expected: list[list[int]]
) -> None:
    monkeypatch.setattr(gloo, "suits", lambda group, device: True)
    params = [_param(number, on_gloo._LARGE - (number in (0, 3))) for number in (2, 0, 3, 1)]
    found = on_gloo.collectives(params, forward)
    assert [[param.ds_id for param in each] for each in found] == expected
    monkeypatch.setattr(gloo, "suits", lambda group, device: False)
    (together,) = on_gloo.collectives(params, forward)
    assert len(together) == 4


def test_stage_2_reduces_each_bucket_where_it_lies(ranks2: Any) -> None:
    for _, counts, _ in ranks2.run(_trained, 2, True):
        assert counts["gathers"] == 1  # after the step
        # In two backwards, of at most six gradients each. Upstream's functions raise.
        assert 2 < counts["reductions"] <= 12


def test_stage_1_makes_the_first_averages_where_the_optimizer_reads_them(ranks2: Any) -> None:
    for _, counts, _ in ranks2.run(_trained, 1, True):
        # Six gradients with 523 elements in all, in four buckets: of the second backward they are added.
        assert counts["in place"] == counts["reductions"] == 4


def test_stage_3_gathers_what_persists_together(ranks2: Any) -> None:
    for _, counts, hooked in ranks2.run(_trained, 3, True):
        # Two large weights in two forwards and two backwards, some together; all four others once, after the step.
        assert counts["gathers"] <= 2 * 4 + 1
        assert 2 < counts["reductions"] <= 12
        assert not hooked
