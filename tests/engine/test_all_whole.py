"""Stage 3 while all weights are whole: modules without upstream's hooks, until a weight is released."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from torch import Tensor, nn

from lightning_zeroplus.engine.build import build_engine
from tests.engine.test_resident import PROGRAMS, Both, Net, Scale

_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 50, "stage3_param_persistence_threshold": 1000},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,
}


def _weights(net: nn.Module) -> Tensor:
    with partition_parameters.GatheredParameters(list(net.parameters())):
        return torch.cat([param.detach().clone().flatten() for param in net.parameters()])


def _release(engine: Any) -> None:
    engine.optimizer.parameter_offload.empty_partition_cache()


def _releases_before(net: Any, backward: Callable[[Tensor], Any], inputs: Tensor) -> None:
    loss = net(inputs)
    if hasattr(net, "optimizer"):
        _release(net)
    backward(loss + net(inputs))


def _releases_within(net: Any, backward: Callable[[Tensor], Any], inputs: Tensor) -> None:
    module = getattr(net, "module", net)
    handle = module.scale.register_forward_hook(lambda *_: _release(net) if hasattr(net, "optimizer") else None)
    backward(net(inputs))
    handle.remove()


def _hooks_read(net: Any, backward: Callable[[Tensor], Any], inputs: Tensor) -> None:
    module = getattr(net, "module", net)
    if hasattr(net, "optimizer"):
        _release(net)
    # The hook runs before that of a module that stays whole would, if it came later.
    handle = module.layers[0].register_forward_pre_hook(lambda layer, args: (args[0] * layer.weight.sum(),))
    backward(net(inputs))
    handle.remove()


def _compiles(net: Any, backward: Callable[[Tensor], Any], inputs: Tensor) -> None:
    layers = getattr(net, "module", net).layers
    compiled = torch.compile(layers, backend="eager")
    backward(net(inputs) + compiled(inputs).sum())
    if hasattr(net, "optimizer"):
        _release(net)
    backward(compiled(inputs).square().mean())
    torch._dynamo.reset()


OTHERS = (_releases_before, _releases_within, _hooks_read, _compiles)


def _train(program: Callable[..., None], whole: bool) -> tuple[Tensor, bool]:
    """The weights after four steps, and whether there are hooks that nobody has removed."""
    torch.manual_seed(0)
    net: Any = Net()
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    if not whole:
        deepspeed.init_distributed(verbose=False)
    engine = net if whole else build_engine(net, sgd, _CONFIG)
    for step in range(4):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        program(engine, Tensor.backward if whole else engine.backward, inputs)
        (sgd if whole else engine).step()
        (sgd if whole else engine.optimizer).zero_grad()
    if whole:
        return torch.cat([param.detach().flatten() for param in net.parameters()]), False
    flat = _weights(net)
    engine.destroy()
    return flat, any(each._forward_pre_hooks or each._forward_hooks for each in net.modules())


@pytest.mark.parametrize("program", (*PROGRAMS, *OTHERS))
def test_it_trains_as_one_process(ranks2: Any, program: Callable[..., None]) -> None:
    wanted, _ = _train(program, whole=True)
    for found, is_hooked in ranks2.run(_train, program, False):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)  # fp32, averaged over two equal ranks
        assert not is_hooked


class _Steps(nn.Module):
    """Steps within its forward, as ``training_step`` does in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        scale = Scale()
        self.scale, self.both, self.layer = scale, Both(scale), nn.Linear(64, 8)
        self.step: Callable[[Tensor], Any] = bool

    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(2):
            self.step(self.layer(self.both(self.scale(inputs))).square().mean())
        return self.layer(self.both(inputs)).sum()


def _seen_in_steps() -> list[Any]:
    """Whether the modules have hooks before and in each of some forwards, and upstream's stack of modules after it."""
    deepspeed.init_distributed(verbose=False)
    net = _Steps()
    engine: Any = build_engine(net, torch.optim.SGD(net.parameters(), 0.1), _CONFIG)
    before = list(FWD_MODULE_STACK)
    seen: list[Any] = []

    def step(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()
        engine.optimizer.zero_grad()
        seen.append(bool(net.layer._forward_pre_hooks))

    net.step = step
    for number in range(4):
        if number == 2:
            _release(engine)
            seen.append(bool(net.layer._forward_pre_hooks))
        engine(torch.ones(1, 8)).backward()
        seen.append([each is one for each, one in zip(FWD_MODULE_STACK, before, strict=True)])
        engine.optimizer.zero_grad()
    engine.destroy()
    return seen


def test_hooks_are_there_from_a_release_to_the_next_forward_in_which_all_is_whole(ranks2: Any) -> None:
    for seen in ranks2.run(_seen_in_steps):
        stack = [True] * len(seen[2])
        # In the first forward, and in the one after the release, weights are gathered; then they stay.
        assert seen == [True, True, stack, False, False, stack, True, True, True, stack, False, False, stack]


def _seen_with_compiled() -> list[bool]:
    """Whether a module has its hook in the second forward: first without, then with compiled code in the process."""
    deepspeed.init_distributed(verbose=False)
    seen = []
    for compiles in (False, True):
        net = nn.Sequential(nn.Linear(8, 8))
        engine: Any = build_engine(net, torch.optim.SGD(net.parameters(), 0.1), _CONFIG)
        if compiles:
            torch.compile(torch.sin, backend="eager")(torch.ones(1))
        for _ in range(2):
            engine(torch.ones(1, 8))
        seen.append(bool(net[0]._forward_pre_hooks))
        engine.destroy()
    torch._dynamo.reset()
    return seen


def test_hooks_stay_where_code_is_compiled(ranks2: Any) -> None:
    assert ranks2.run(_seen_with_compiled) == [[False, True]] * 2
