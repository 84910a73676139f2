"""Steps of torch optimizers in blocks, against steps of the same tensors as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader

from lightning_zeroplus.gradients.patches import block_steps
from lightning_zeroplus.gradients.patches.block_steps import BLOCK, every_step_in_blocks, in_blocks
from lightning_zeroplus.testing import RankPool
from tests.support.training import everywhere
from tests.support.training import zero_plus as zero_plus_strategy

#: In 10 blocks, in one piece, in 8 blocks, and too small to be cut.
SIZES = (9 * BLOCK + 77, 9, 8 * BLOCK, 8 * BLOCK - 1)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, 0.1, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, 0.1, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.1, lr_decay=0.1),
    "adadelta": lambda params: torch.optim.Adadelta(params, 0.1),
    "adamax": lambda params: torch.optim.Adamax(params, 0.1),
    "asgd": lambda params: torch.optim.ASGD(params, 0.1),
    "nadam": lambda params: torch.optim.NAdam(params, 0.1),
    "radam": lambda params: torch.optim.RAdam(params, 0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 0.1, momentum=0.5, centered=True),
    "rprop": lambda params: torch.optim.Rprop(params, 0.1),
}


def _numbers(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(each) for each in _numbers(0)]


def _give_gradients(params: list[nn.Parameter], seed: int = 1) -> None:
    for param, grad in zip(params, _numbers(seed), strict=True):
        param.grad = grad


def _counted(optimizer: torch.optim.Optimizer) -> list[int]:
    """How many tensors each step has, from now on."""
    counts: list[int] = []
    init_group: Any = optimizer._init_group  # type: ignore[attr-defined]

    def counting(group: dict[str, Any], *args: Any) -> Any:
        counts.append(len(group["params"]))
        return init_group(group, *args)

    optimizer._init_group = counting  # type: ignore[attr-defined]
    return counts


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_in_blocks_have_the_same_bits(name: str) -> None:
    params, others = _params(), _params()
    optimizer, reference = OPTIMIZERS[name](params), OPTIMIZERS[name](others)
    counts = _counted(optimizer)
    for step in range(4):
        _give_gradients(params, step)
        _give_gradients(others, step)
        states = {key: id(value) for key, value in optimizer.state[params[0]].items()}
        with in_blocks(optimizer):
            optimizer.step()
        reference.step()
        assert optimizer.param_groups[0]["params"] == params
        assert {key: id(value) for key, value in optimizer.state[params[0]].items()} == states or step == 0
    has_state_at_first = name in ("adagrad",)
    assert counts == [20 if has_state_at_first else 4, 20, 20, 20]
    assert set(optimizer.state) == set(params)
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)
        assert optimizer.state[param].keys() == reference.state[other].keys()
        for key, value in reference.state[other].items():
            assert torch.equal(torch.as_tensor(optimizer.state[param][key]), torch.as_tensor(value)), key


class _OfItsOwn(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: _OfItsOwn(params),
        lambda params: torch.optim.Adam(params, fused=True),
        lambda params: torch.optim.Adam(params, foreach=True),
        lambda params: torch.optim.SGD(params),  # has no state, and takes one pass
    ],
)
def test_other_optimizers_step_as_always(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    params = _params()
    optimizer = make(params)
    for _ in range(2):
        _give_gradients(params)
        optimizer.step()
    with in_blocks(optimizer):
        assert optimizer.param_groups[0]["params"] == params


def test_a_state_that_a_step_replaces_is_joined_again() -> None:
    params = _params()
    optimizer = torch.optim.SGD(params, 0.1, momentum=0.9)
    _give_gradients(params)
    optimizer.step()
    with in_blocks(optimizer):
        for block in optimizer.param_groups[0]["params"]:
            optimizer.state[block] = {"momentum_buffer": 2 * optimizer.state[block]["momentum_buffer"], "new": 1}
    for param, grad in zip(params, _numbers(1), strict=True):
        assert torch.equal(optimizer.state[param]["momentum_buffer"], 2 * grad)
        assert optimizer.state[param]["new"] == 1


def test_a_step_that_raises_leaves_the_groups_and_states_as_they_were() -> None:
    params = _params()
    optimizer = torch.optim.Adam(params)
    _give_gradients(params)
    optimizer.step()
    before = {param: dict(optimizer.state[param]) for param in params}
    with pytest.raises(FloatingPointError), every_step_in_blocks([optimizer]):
        with patch("torch.optim.adam._single_tensor_adam", side_effect=FloatingPointError):
            optimizer.step()
    assert optimizer.param_groups[0]["params"] == params
    assert set(optimizer.state) == set(params)
    assert all(optimizer.state[param][key] is value for param in params for key, value in before[param].items())
    assert not torch_optimizer._global_optimizer_pre_hooks and not optimizer._optimizer_step_pre_hooks


def test_a_hook_sees_whole_tensors() -> None:
    params = _params()
    optimizer = torch.optim.Adam(params)
    seen: list[int] = []
    for hooked in (False, True):
        counts = _counted(optimizer)
        if hooked:
            optimizer.register_step_pre_hook(lambda own, *_: seen.append(len(own.param_groups[0]["params"])))
        for _ in range(2):
            _give_gradients(params)
            with every_step_in_blocks([optimizer]):
                optimizer.step()
        assert counts == ([4, 4] if hooked else [4, 20])
    assert seen == [4, 4]


class _Wide(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 40_000), nn.Tanh(), nn.Linear(40_000, 3))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def _trained(strategy: str, cuts: bool) -> tuple[Tensor, int]:
    """The weights after three steps, and the number of blocks of all steps."""
    from lightning_zeroplus.strategy.fsdp2.trainer import ZeroPlusFSDPStrategy

    blocks: list[Tensor] = []

    def seen(*args: Any) -> list[Tensor]:
        made = _blocks(*args)
        blocks.extend(made if len(made) > 1 else ())
        return made

    _blocks = block_steps._blocks
    chosen: Any = ZeroPlusFSDPStrategy() if strategy == "fsdp" else zero_plus_strategy(int(strategy))
    module = _Wide()
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(strategy=chosen, **everywhere(), max_epochs=1, use_distributed_sampler=False, **quiet)
    with patch.object(block_steps, "_blocks", seen), patch.object(block_steps, "BLOCK", 2**13 if cuts else 2**40):
        trainer.fit(module, DataLoader([torch.randn(4, 8) for _ in range(3)], batch_size=None))
    return torch.cat([param.detach().flatten() for param in module.parameters()]), len(blocks)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("strategy", ["0", "1", "2", "3", "fsdp"])
def test_a_fit_in_blocks_has_the_same_bits(ranks2: RankPool, strategy: str) -> None:
    (cut, blocks), *_ = ranks2.run(_trained, strategy, True)
    (whole, none), *_ = ranks2.run(_trained, strategy, False)
    assert blocks and not none
    assert torch.equal(cut, whole)
