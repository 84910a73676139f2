"""The engine's own forward and backward on the CPU: what upstream's give, bit for bit, without calling them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.utils import nvtx
from torch import Tensor, nn

import lightning_zeroplus as zp
from lightning_zeroplus.engine.upstream import passes, probe
from lightning_zeroplus.engine.upstream.passes import ShortPasses
from lightning_zeroplus.gradients.patches.replacement import Replacement
from tests.strategy.test_fabric import fabric

_PASSES = ("forward", "backward", "_forward_prologue", "_forward_epilogue")

pytestmark = pytest.mark.skipif(
    not probe.has("passes that do what they always did"), reason="the passes of this DeepSpeed are others, and run"
)


class _Net(nn.Module):
    """Reads a weight of another module; gains a module in the fit, which shares one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs))
        if hasattr(self, "late"):
            hidden = hidden + self.late(hidden)
        return nn.functional.linear(self.last(hidden), self.first.weight)

    def grow(self) -> None:
        self.late = nn.Linear(16, 16)
        self.late.requires_grad_(False)
        self.late.bias = self.first.bias


@contextmanager
def _counted() -> Iterator[dict[str, int]]:
    """How often upstream's passes are called."""
    calls = dict.fromkeys(_PASSES, 0)

    def counts(name: str) -> Any:
        upstream = getattr(DeepSpeedEngine, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return upstream(*args, **kwargs)

        return call

    with patch.multiple(DeepSpeedEngine, **{name: counts(name) for name in _PASSES}):
        yield calls


def _train(stage: int, config: dict[str, Any]) -> tuple[dict[str, int], list[Tensor]]:
    """The calls of upstream's passes in a fit, and what it has trained, with its losses."""
    run = fabric(zp.ZeroPlusFabricStrategy(stage, config=config))
    net = _Net()
    model, optimizer = run.setup(net, torch.optim.AdamW(net.parameters(), 0.01))
    batches = torch.randn(4, 2, 3, 8, generator=torch.Generator().manual_seed(run.global_rank))
    seen = []
    with _counted() as calls:
        for index, batch in enumerate(batches):
            with run.no_backward_sync(model):
                run.backward(model(batch[0]).square().mean())
            loss = model(batch[1]).square().mean()
            loss.backward() if index == 1 else run.backward(loss)
            seen.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            if index == 2:
                net.grow()
    return calls, [*seen, *(value.clone() for value in model.state_dict().values())]


def _both(stage: int) -> tuple[dict[str, int], dict[str, int], bool]:
    own_calls, own = _train(stage, {})
    with patch.object(ShortPasses, "has_short_passes", lambda self: False):
        calls, upstreams = _train(stage, {})
    return own_calls, calls, len(own) > 8 and all(map(torch.equal, own, upstreams))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_they_give_what_upstreams_give_bit_for_bit(ranks2: Any, stage: int) -> None:
    for own, upstreams, same in ranks2.run(_both, stage):
        assert same
        assert own == dict.fromkeys(_PASSES, 0)
        assert upstreams == dict.fromkeys(_PASSES, 8) | {"backward": 7}  # one is the user's own


def _with_a_config() -> dict[str, int]:
    return _train(2, {"wall_clock_breakdown": True})[0]


def test_upstreams_run_where_the_config_asks_for_more(ranks2: Any) -> None:
    assert all(min(calls.values()) > 0 for calls in ranks2.run(_with_a_config))


def _marks() -> list[bool]:
    """Whether upstream marks functions for profilers: before two engines are there, then, and after each has gone."""
    own = Replacement(nvtx, "enable_nvtx", False)  # engines of other tests may still be there
    with patch.object(nvtx, "enable_nvtx", True), patch.object(passes, "_without_marks", own):
        found = [nvtx.enable_nvtx]
        engines = []
        for stage in (1, 2):
            net = _Net()
            model, _ = fabric(zp.ZeroPlusFabricStrategy(stage)).setup(net, torch.optim.SGD(net.parameters(), 0.1))
            engines.append(model._forward_module)
        found.append(nvtx.enable_nvtx)
        for engine in engines:
            engine.destroy()
            found.append(nvtx.enable_nvtx)
    return found


def test_upstreams_functions_are_marked_again_after_the_last_engine(ranks2: Any) -> None:
    assert ranks2.run(_marks) == [[True, False, False, True]] * 2


def test_upstreams_run_where_they_do_more_than_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = DeepSpeedEngine.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.balance_experts()  # what a later release might add
        return upstream(self, *args, **kwargs)

    feature = "passes that do what they always did"
    (each,) = [each for each in probe.OPTIONAL if each.feature == feature]
    assert each.missing() == []
    monkeypatch.setattr(DeepSpeedEngine, "forward", forward)
    assert each.missing() == ["DeepSpeedEngine.forward -> balance_experts"]
