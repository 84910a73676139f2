"""Windows, no_sync and exceptions under ZeroPlusFSDPStrategy: what they hold, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lightning_zeroplus.weight_grads.convert import defer_weight_grads
from tests.fsdp.training import DIM, ManualTask, Net, fit, full, ours, relative_error, weights

BOUND = 1e-6


class Scripted(ManualTask):
    """Runs ``script(self, batch)`` as its training step, with 4 weighted losses at hand."""

    def __init__(self, script: Callable[[Any, Any], None], make_net: Callable[[], nn.Module] = Net) -> None:
        super().__init__(make_net=make_net)
        self.script = script

    def backward_all(self, batch: Any) -> None:
        for chunk in self.chunks(batch):
            self.manual_backward(self.loss(chunk) / self.backwards)

    def step(self) -> None:
        self.optimizers().step()
        self.optimizers().zero_grad()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.script(self, batch)


def _plainly(task: Any, batch: Any) -> None:
    task.backward_all(batch)
    task.step()


def _run(script: Any, defer: bool = True, make_net: Callable[[], nn.Module] = Net, **kwargs: Any) -> Any:
    task = Scripted(script, make_net)
    if defer:
        defer_weight_grads(task)
    return fit(ours(**kwargs), task)


def _error(script: Any, kwargs: dict[str, Any]) -> float:
    return relative_error(weights(_run(script, **kwargs)), weights(_run(_plainly, defer=False)))


def _no_sync(task: Any, batch: Any) -> None:
    *held, last = task.chunks(batch)
    with task.trainer.strategy.block_backward_sync():
        for chunk in held:
            task.manual_backward(task.loss(chunk) / 4)
    task.manual_backward(task.loss(last) / 4)
    task.step()


def _no_sync_to_the_end(task: Any, batch: Any) -> None:
    with task.trainer.strategy.block_backward_sync():
        task.backward_all(batch)
    task.step()


def _two_windows(task: Any, batch: Any) -> None:
    chunks = task.chunks(batch)
    for half in (chunks[:2], chunks[2:]):
        with task.trainer.strategy.coalesce(backwards=2):
            for chunk in half:
                task.manual_backward(task.loss(chunk) / 4)
            assert task.trainer.strategy._gradients.units.held_bytes() == 0  # the announced last one has reduced
    task.step()


def _bounded(task: Any, batch: Any) -> None:
    units = task.trainer.strategy._gradients.units
    budget = sum(unit.grad_bytes for unit in units.all) - 1
    with task.trainer.strategy.coalesce(max_bytes=budget) as held:
        task.backward_all(batch)
        assert 0 < units.held_bytes() <= held.bytes <= budget < held.all_bytes
        assert held.parameters < held.all_parameters
    assert units.held_bytes() == 0
    task.step()


def _survives_an_exception(task: Any, batch: Any) -> None:
    """In a window, in a forward, and in a backward: then the step is made as if nothing had been."""
    strategy = task.trainer.strategy
    with pytest.raises(ZeroDivisionError):
        with strategy.coalesce():
            task.backward_all(batch)
            raise ZeroDivisionError
    assert len(strategy.weight_grads) == 0 and strategy._gradients.units.held_bytes() == 0
    assert all(param.grad is None for param in task.parameters())
    with pytest.raises(ZeroDivisionError):
        logits = task.net(batch[0])
        logits.register_hook(lambda grad: 1 / 0)
        task.manual_backward(logits.sum())
    blocks = task.net.blocks
    handle = blocks[0].register_full_backward_pre_hook(lambda module, grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        task.backward_all(batch)
    handle.remove()
    assert all(param.grad is None for param in task.parameters())
    task.backward_all(batch)
    task.step()


def _survives_an_exception_before_torch_2_13(task: Any, batch: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "reset_iter_state", raising=False)
        _survives_an_exception(task, batch)


WAYS = (
    _no_sync,
    _no_sync_to_the_end,
    _two_windows,
    _survives_an_exception,
    _survives_an_exception_before_torch_2_13,
)


# Under "step" a bounded window has nothing to bound: everything waits for the step.
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("script", "reduction"),
    [
        *product(WAYS, ("backward",)),
        *(pytest.param(way, "step", marks=pytest.mark.slow) for way in WAYS),
        (_bounded, "backward"),
    ],
)
def test_every_way_to_wait_gives_the_same_parameters(ranks2: Any, script: Any, reduction: str) -> None:
    assert max(ranks2.run(_error, script, {"reduction": reduction})) <= BOUND


# -- refusals ---------------------------------------------------------------------------------------------------------


def _steps_inside(task: Any, batch: Any) -> None:
    with task.trainer.strategy.coalesce():
        task.backward_all(batch)
        task.optimizers().step()


def _clips_inside(task: Any, batch: Any) -> None:
    with task.trainer.strategy.coalesce():
        task.backward_all(batch)
        task.clip_gradients(task.optimizers(), gradient_clip_val=1.0, gradient_clip_algorithm="norm")


def _zeroes_inside(task: Any, batch: Any) -> None:
    with task.trainer.strategy.coalesce():
        task.backward_all(batch)
        task.optimizers().zero_grad()


def _steps_in_no_sync(task: Any, batch: Any) -> None:
    with task.trainer.strategy.block_backward_sync():
        task.backward_all(batch)
        task.optimizers().step()


def _leaves_open(task: Any, batch: Any) -> None:
    task.window = task.trainer.strategy.coalesce()
    task.window.__enter__()
    task.backward_all(batch)


def _announces_wrongly(task: Any, batch: Any) -> None:
    with task.trainer.strategy.coalesce(backwards=5):
        task.backward_all(batch)


def _refused(script: Any) -> tuple[str, bool]:
    task = Scripted(script)
    defer_weight_grads(task)
    before = torch.cat([param.detach().flatten() for param in task.parameters()])
    try:
        fit(ours(), task)
    except RuntimeError as error:
        return str(error), torch.equal(weights(task), before)
    return "nothing raised", False


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (_steps_inside, "step() inside a coalesce() window"),
        (_clips_inside, "inside a coalesce() window"),
        (_zeroes_inside, "zero_grad() inside a coalesce() window"),
        (_steps_in_no_sync, "inside block_backward_sync()"),
        (_leaves_open, "still open at the end of training_step"),
        (_announces_wrongly, "saw 4 backwards"),
    ],
)
def test_refusals_change_nothing(ranks2: Any, script: Any, message: str) -> None:
    for said, unchanged in ranks2.run(_refused, script):
        assert message in said and unchanged


# -- gradients that come when their unit is reduced -----------------------------------------------------------------


class _EntersByAMethod(Net):
    """FSDP2 gathers around ``encode``, but no hook of ``forward`` runs."""

    def encode(self, x: Tensor) -> Tensor:
        return Net.forward(self, x)


class _Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class _HidesItsOutput(nn.Module):
    """An output in which no tensor is found: nothing tells when a backward begins or ends."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, 4, bias=bias)

    def forward(self, x: Tensor) -> _Output:
        return _Output(self.linear(x))


def _make_hidden_without_bias() -> nn.Module:
    return _HidesItsOutput(bias=False)


def _enter_by_a_method(task: Any, x: Tensor) -> Tensor:
    if isinstance(task.net, FSDPModule):
        register_fsdp_forward_method(task.net, "encode")
    return task.net.encode(x)


def _take_hidden(task: Any, x: Tensor) -> Tensor:
    return task.net(x).logits


class _Late(Scripted):
    """Backwards by Lightning, or the user's own."""

    def __init__(self, enter: Any, make_net: Any, by_lightning: bool) -> None:
        super().__init__(self.run, make_net)
        self.enter, self.by_lightning = enter, by_lightning

    @staticmethod
    def run(task: Any, batch: Any) -> None:
        for x in batch[0].chunk(2):
            loss = task.enter(task, x).square().mean()
            task.manual_backward(loss) if task.by_lightning else loss.backward()
        task.step()


def _late_error(enter: Any, make_net: Any, by_lightning: bool) -> float:
    task = _Late(enter, make_net, by_lightning)
    defer_weight_grads(task)
    reference = _Late(enter, make_net, by_lightning=True)  # without it, DDP reduces nothing in manual optimization
    strategy = ours()
    error = relative_error(weights(fit(strategy, task)), weights(fit("ddp", reference)))
    assert strategy.weight_grads.on_put is None, "the store may be the user's, and outlive the fit"
    return error


@pytest.mark.sampled
@pytest.mark.parametrize("by_lightning", [True, False])
@pytest.mark.parametrize(
    ("enter", "make_net"),
    [
        (_enter_by_a_method, _EntersByAMethod),
        (_take_hidden, _HidesItsOutput),
        (_take_hidden, _make_hidden_without_bias),
    ],
)
def test_late_gradients_are_reduced(ranks2: Any, enter: Any, make_net: Any, by_lightning: bool) -> None:
    assert max(ranks2.run(_late_error, enter, make_net, by_lightning)) <= BOUND


# -- parts that the last backward does not reach ----------------------------------------------------------------------


class _TwoRoots(ManualTask):
    """The second root has its last gradient in the first backward of each window."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(DIM, 4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with self.trainer.strategy.coalesce(backwards=2):
            self.manual_backward(self.second(batch[0]).square().mean() + self.loss(batch))
            self.manual_backward(self.loss(batch))
        assert all(param.grad is not None for param in self.parameters())
        self.optimizers().step()
        self.optimizers().zero_grad()


def _two_roots() -> float:
    task = _TwoRoots()
    start = task.second.weight.detach().clone()
    fit(ours(), task, max_steps=3)
    return float((full(task.second.weight) - start).norm())


def test_a_root_that_the_last_backward_does_not_reach_is_reduced(ranks2: Any) -> None:
    assert min(ranks2.run(_two_roots)) > 0


def test_coalesce_needs_fit() -> None:
    with pytest.raises(RuntimeError, match="during fit only"):
        with ours().coalesce():
            pass
