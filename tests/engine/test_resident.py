"""Stage 3: modules whose weights stay gathered, without upstream's hooks, in whatever order they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from torch import Tensor, nn

from lightning_zeroplus.engine.build import build_engine

_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 50, "stage3_param_persistence_threshold": 40},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,
}


class Scale(nn.Module):
    """A leaf whose weights stay."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight


class Both(nn.Module):
    """A module that is hooked, and shares a small weight with one that is not."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.weight = scale.weight
        self.large = nn.Parameter(torch.eye(8).repeat(1, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * self.weight) @ self.large


class Net(nn.Module):
    """Linear layers, small and large, and a weight that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8), nn.LayerNorm(8))
        self.both = Both(self.scale)

    def forward(self, inputs: Tensor, fails: bool = False) -> Tensor:
        hidden = self.layers(self.scale(inputs))
        if fails:
            raise KeyError("in the forward")
        return self.both(self.layers(hidden)).square().mean()


def _plainly(net: Any, backward: Callable[[Tensor], Any], inputs: Tensor) -> None:
    backward(net(inputs))


def _validates_before(net: Any, backward: Callable[[Tensor], Any], inputs: Tensor) -> None:
    with torch.inference_mode():
        net(inputs)
    backward(net(inputs))


def _fails_before(net: Any, backward: Callable[[Tensor], Any], inputs: Tensor) -> None:
    with pytest.raises(KeyError):
        net(inputs, fails=True)
    backward(net(inputs))


def _reads_within(net: Any, backward: Callable[[Tensor], Any], inputs: Tensor) -> None:
    loss = net(inputs)
    params = [param for param in net.parameters() if hasattr(param, "ds_id")]
    if params:
        with partition_parameters.GatheredParameters(params):
            pass
    backward(loss)


def _validates_within(net: Any, backward: Callable[[Tensor], Any], inputs: Tensor) -> None:
    loss = net(inputs)
    with torch.no_grad():
        net(inputs + 1)
    backward(loss)


def _runs_others(net: Any, backward: Callable[[Tensor], Any], inputs: Tensor) -> None:
    module = getattr(net, "module", net)
    backward(net(inputs))
    backward(module.scale(inputs).square().mean())  # no forward of the whole before it


PROGRAMS = (_plainly, _validates_before, _fails_before, _reads_within, _validates_within, _runs_others)


def _train(program: Callable[..., None], whole: bool) -> tuple[Tensor, list[bool]]:
    torch.manual_seed(0)
    net: Any = Net()
    params = list(net.parameters())
    sgd = torch.optim.SGD(params, 0.1)
    hooked = []
    if not whole:
        deepspeed.init_distributed(verbose=False)
    engine = net if whole else build_engine(net, sgd, _CONFIG)
    optimizer: Any = sgd if whole else engine.optimizer
    for step in range(4):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        program(engine, Tensor.backward if whole else engine.backward, inputs)
        (sgd if whole else engine).step()
        optimizer.zero_grad()
    if not whole:
        hooked = [bool(each._forward_hooks) for each in (net.scale, net.layers, net.layers[0], net.both)]
        with partition_parameters.GatheredParameters(params):
            flat = torch.cat([param.detach().clone().flatten() for param in params])
        engine.destroy()
        assert not any("Residents" in repr(hook) for each in net.modules() for hook in each._forward_pre_hooks.values())
        return flat, hooked
    return torch.cat([param.detach().flatten() for param in params]), hooked


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_trains_as_one_process(ranks2: Any, program: Callable[..., None]) -> None:
    wanted, _ = _train(program, whole=True)
    torch.manual_seed(0)
    before = torch.cat([param.detach().flatten() for param in Net().parameters()])
    for found, hooked in ranks2.run(_train, program, False):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)  # fp32, averaged over two equal ranks
        assert hooked == [False, False, False, True]
    assert ((wanted - before).abs() > 1e-5).float().mean() > 0.9


def _between_passes() -> list[list[bool]]:
    """Which parameters of layers are whole: after a forward that is evaluated, a backward, and a step; two times."""
    deepspeed.init_distributed(verbose=False)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    engine = build_engine(net, torch.optim.SGD(net.parameters(), 0.1), dict(_CONFIG))
    whole = partition_parameters.ZeroParamStatus.AVAILABLE
    seen = []

    def look() -> None:
        seen.append([param.ds_status is whole for param in net.parameters()])

    for _ in range(2):
        with torch.no_grad():
            engine(torch.ones(1, 8))
        look()
        engine.backward(engine(torch.ones(1, 8)).square().mean())
        look()
        engine.step()
        look()
    engine.destroy()
    return seen


def test_small_weights_beside_large_ones_stay_from_the_first_forward_on(ranks2: Any) -> None:
    assert ranks2.run(_between_passes) == [[[False, True] * 2] * 6] * 2


class Block(nn.Module):
    """Upstream may gather it as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).tanh())


def _trains_blocks(granularity: int) -> tuple[Tensor, bool]:
    """The weights after three steps, and whether upstream frees the memory of whole modules itself."""
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
    net = nn.Sequential(Block(), nn.Linear(8, 8))
    zero = {**_CONFIG["zero_optimization"], "stage3_module_granularity_threshold": granularity}  # type: ignore[dict-item]
    engine = build_engine(net, torch.optim.SGD(net.parameters(), 0.1), {**_CONFIG, "zero_optimization": zero})
    frees = engine.optimizer.parameter_offload.fast_sharding_for_leaf_module
    for _ in range(3):
        with torch.no_grad():
            engine(torch.ones(1, 8))
        engine.backward(engine(torch.ones(1, 8)).square().mean())
        engine.step()
        engine.optimizer.zero_grad()
    with partition_parameters.GatheredParameters(list(net.parameters())):
        flat = torch.cat([param.detach().clone().flatten() for param in net.parameters()])
    engine.destroy()
    return flat, frees


def test_small_weights_of_modules_that_are_gathered_as_a_whole(ranks2: Any) -> None:
    for (whole, frees), (each, _) in zip(ranks2.run(_trains_blocks, 1000), ranks2.run(_trains_blocks, 0), strict=True):
        assert frees and torch.equal(whole, each)
