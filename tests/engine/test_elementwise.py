"""Optimizers that need whole tensors are recognized by what they do: they have them, or are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zeroplus.engine.families.zero3 import Zero3Accumulation
from lightning_zeroplus.engine.optimizer.elementwise import (
    class_of_states,
    couples_tensors,
    has_common_states,
    needs_whole_tensors,
)
from lightning_zeroplus.engine.optimizer.owned_steps import balanced
from lightning_zeroplus.strategy.deepspeed.config.checks import check_optimizer
from tests.programs.own_optimizers import Adam8Bits
from tests.support.training import Classifier, fit, loader, trainer, weights, zero_plus


def _evaluate(closure: Any) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Lion(Optimizer):
    """`Chen et al., 2023 <https://arxiv.org/abs/2302.06675>`_."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = _evaluate(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                first, second = group["betas"]
                param.sub_(torch.sign(momentum * first + param.grad * (1 - first)), alpha=group["lr"])
                momentum.mul_(second).add_(param.grad, alpha=1 - second)
        return loss


class Lars(Optimizer):
    """A learning rate for each tensor, by its norm: `You et al., 2017 <https://arxiv.org/abs/1708.03888>`_."""

    def __init__(self, params: Any, lr: float = 0.1, trust: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = _evaluate(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    rate = group["trust"] and group["trust"] * param.norm() / param.grad.norm().clamp(min=1e-8)
                    param.sub_(param.grad * rate, alpha=group["lr"])
        return loss


class Lamb(torch.optim.Adam):
    """The trust ratio on Adam's update."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = _evaluate(closure)
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        before = [param.detach().clone() for param in params]
        super().step()
        for param, old in zip(params, before, strict=True):
            update = param.detach() - old
            param.data.copy_(old + update * old.norm() / update.norm().clamp(min=1e-8) * 0.01)
        return loss


class Soap(Optimizer):
    """Adam-like, in the eigenbasis of the gradients' second moment of rows."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = _evaluate(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    grad = param.grad.flatten(1) if param.dim() > 1 else param.grad[:, None]
                    moment = self.state[param].setdefault("moment", torch.zeros(len(grad), len(grad)))
                    moment.add_(grad @ grad.T)
                    basis = torch.linalg.eigh(moment)[1]
                    param.sub_((basis @ torch.sign(basis.T @ grad)).view_as(param), alpha=group["lr"])
        return loss


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = _evaluate(closure)
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(torch.randn_like(param), alpha=0.1)
        return loss


class _Codes(Tensor):
    """States in a tensor class of their own, as torchao's of 8 bits."""


class OwnStates(Lion):
    """Keeps states of large tensors in a class of its own, as `torchao.optim.AdamW8bit`."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.numel() >= 4096 and not self.state[param]:
                    self.state[param]["momentum"] = torch.zeros_like(param).as_subclass(_Codes)
        return super().step(closure)


ELEMENTWISE: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, 1e-3),
    "adamw foreach": lambda params: torch.optim.AdamW(params, 1e-3, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, 1e-3, fused=True),
    "adamw lr tensor": lambda params: torch.optim.AdamW(params, torch.tensor(1e-3), foreach=False),
    "amsgrad": lambda params: torch.optim.Adam(params, 1e-3, amsgrad=True, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, 0.1),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "nesterov": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, nesterov=True),
    "lion": Lion,
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 0.01, momentum=0.5, centered=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
}
WHOLE: dict[str, Any] = {
    "lars": Lars,
    "lamb": Lamb,
    "adafactor": torch.optim.Adafactor,
    "muon": lambda params: torch.optim.Muon([param for param in params if param.dim() == 2], 0.02),
    "soap": Soap,
    "adam in 8 bits": lambda params: Adam8Bits(params, 1e-2),
    "noise": Noisy,  # one cannot tell
}


@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_what_an_optimizer_does_tells(name: str) -> None:
    """The probe touches neither the optimizer, nor what is attached to it, nor the random numbers."""
    net = nn.Linear(3, 2)
    optimizer = (ELEMENTWISE | WHOLE)[name](net.parameters())
    torch.optim.lr_scheduler.LinearLR(optimizer)  # wraps `step`
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    states = copy.deepcopy(list(optimizer.state.values()))
    before, random = [param.detach().clone() for param in net.parameters()], torch.get_rng_state()
    assert needs_whole_tensors(optimizer) == (name in WHOLE)
    assert all(torch.equal(param, old) for param, old in zip(net.parameters(), before, strict=True))
    assert all(param.grad is None for param in net.parameters())
    assert str(list(optimizer.state.values())) == str(states)
    assert not calls and torch.equal(torch.get_rng_state(), random)
    assert [float(group["lr"]) for group in optimizer.param_groups] == rates
    assert optimizer._opt_called is False if hasattr(optimizer, "_opt_called") else True


def test_states_in_a_class_of_their_own_are_refused() -> None:
    optimizer = OwnStates(nn.Linear(3, 2).parameters())
    assert class_of_states(optimizer) is _Codes and not optimizer.state
    assert all(class_of_states(make(nn.Linear(3, 2).parameters())) is None for make in (ELEMENTWISE | WHOLE).values())
    for stage in range(4):
        with pytest.raises(MisconfigurationException, match=f"`OwnStates` keeps states as `_Codes`.* stage {stage}"):
            check_optimizer(optimizer, stage, "32-true")


def _refused(strategy: str) -> str:
    class Refused(Classifier):
        def configure_optimizers(self) -> Any:
            return OwnStates(self.parameters())

    with pytest.raises(MisconfigurationException) as caught:
        trainer(strategy, max_epochs=1).fit(Refused(), loader())
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["zeroplus_stage2", "zeroplus_fsdp"])
def test_states_in_a_class_of_their_own_are_refused_before_a_fit(ranks2: Any, strategy: str) -> None:
    for message in ranks2.run(_refused, strategy):
        assert "`OwnStates` keeps states as `_Codes`" in message and "`torch.optim.AdamW`" in message


def test_each_kind_of_group_is_asked() -> None:
    """Per group: a learning rate of zero, as a warm-up begins, hides nothing; and groups of vectors count as such."""
    net = nn.Linear(3, 2)
    plain, trusted = {"params": [net.bias], "trust": 0.0}, {"params": [net.weight], "lr": 0.0}
    assert not needs_whole_tensors(Lars([plain]))
    assert needs_whole_tensors(Lars([plain, trusted]))
    assert needs_whole_tensors(Lars([net.bias]))


def test_rows_may_be_enough() -> None:
    class ByRow(Lars):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            loss = _evaluate(closure)
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(nn.functional.normalize(param.grad, dim=-1), alpha=group["lr"])
            return loss

    optimizer = ByRow(nn.Linear(3, 2).parameters())
    optimizer.param_groups[0]["params"].pop()
    assert needs_whole_tensors(optimizer)


class _Optimized(Classifier):
    def __init__(self, kind: str) -> None:
        super().__init__(scheduler=None)
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return (ELEMENTWISE | WHOLE)[self.kind](self.net.parameters())


def _trained(kind: str) -> list[tuple[int, float, float]]:
    want: Tensor = weights(fit("ddp", _Optimized(kind), max_epochs=1))
    start = weights(_Optimized(kind))
    found = []
    for stage in (0, 1, 2, 3):
        got = weights(fit(zero_plus(stage), _Optimized(kind), max_epochs=1))
        found.append((stage, float((got - want).norm() / want.norm()), float((want - start).norm())))
    return found


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", ["lars", "adafactor", "lion", "nadam"])
def test_they_train_as_under_ddp(ranks2: Any, kind: str) -> None:
    for found in ranks2.run(_trained, kind):
        for stage, error, moved in found:
            assert error <= 1e-6 and moved > 1e-2, (stage, error, moved)


def _resumed(folder: str) -> tuple[list[float], list[int]]:
    want = weights(fit("ddp", _Optimized("adafactor"), max_epochs=2))
    for stage in (1, 3):
        first = trainer(zero_plus(stage), max_epochs=1)
        first.fit(_Optimized("adafactor"), loader(), loader(64))
        first.save_checkpoint(f"{folder}/{stage}.ckpt")
    errors, states = [], []
    for saved, stage in ((1, 3), (3, 1), (3, 3)):
        module = _Optimized("adafactor")
        second = trainer(zero_plus(stage), max_epochs=2)
        second.fit(module, loader(), loader(64), ckpt_path=f"{folder}/{saved}.ckpt")
        errors.append(float((weights(module) - want).norm() / want.norm()))
        values = [v for state in second.strategy.model.basic_optimizer.state.values() for v in state.values()]
        states.append(sum(value.numel() for value in values if isinstance(value, Tensor) and value.dim()))
    return errors, states


def test_the_states_are_resumed_at_another_stage_and_lie_on_one_rank(ranks2: Any, tmp_path: Path) -> None:
    (errors, states), (_, others) = ranks2.run(_resumed, str(tmp_path))
    assert max(errors) <= 1e-6
    shapes = [param.shape for param in _Optimized("adafactor").net.parameters()]
    # One number for each row and each column, or for each element of a vector.
    everything = sum(sum(shape) for shape in shapes)
    for stage_3 in (0, 2):
        assert states[stage_3] + others[stage_3] == everything
        assert 0 < states[stage_3] < everything


def test_parameters_are_shared_out_evenly() -> None:
    assert balanced({0: 5, 1: 9, 2: 4, 3: 1}, 2) == {1: 0, 0: 1, 2: 1, 3: 0}


@pytest.mark.parametrize(("nvme", "muon", "remedy"), [(True, False, "to the CPU"), (False, True, "`torch.optim.Muon`")])
def test_what_stage_3_cannot_step_whole_is_refused(nvme: bool, muon: bool, remedy: str) -> None:
    upstreams = SimpleNamespace(optimizer=Lars([torch.ones(1)]), swap_optimizer=nvme, use_muon=muon)
    with pytest.raises(ValueError, match=f"`Lars`.*{remedy}"):
        Zero3Accumulation.step_whole_tensors(SimpleNamespace(optimizer=upstreams))  # type: ignore[arg-type]


def _refused_where_nobody_has_whole_tensors() -> str:
    strategy = zero_plus(1, accumulate_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"`Adafactor` needs whole tensors.*Use stage 0, or stage 2") as refused:
        fit(strategy, _Optimized("adafactor"), max_epochs=1, precision="bf16-true")
    return str(refused.value)


def test_flat_gradients_of_all_are_refused(ranks2: Any) -> None:
    assert all("BF16_Optimizer" in message for message in ranks2.run(_refused_where_nobody_has_whole_tensors))


class Clips(Lion):
    """Clips by the norm of all gradients, within its step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 0.1)
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad, alpha=group["lr"])


class Estimates(Lion):
    """Adds up gradients in a setting, which will change the learning rate much later, as Prodigy does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["estimate"] = group.get("estimate", 0.0) + sum(float(p.grad.norm()) for p in group["params"])
        return super().step(closure)


class Counts(Lion):
    """Counts its steps in a state of no parameter, as MADGRAD does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.state["k"] = self.state.get("k", 0) + 1  # type: ignore[index, operator]
        return super().step(closure)


@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_optimizers_of_one_tensor_at_a_time(name: str) -> None:
    optimizer = (ELEMENTWISE | WHOLE)[name](nn.Linear(3, 2).parameters())
    assert not couples_tensors(optimizer) and not has_common_states(optimizer)


@pytest.mark.parametrize("cls", [Clips, Estimates])
def test_an_optimizer_that_uses_all_gradients_is_refused_where_ranks_have_parts(cls: Any) -> None:
    optimizer = cls(nn.Linear(3, 2).parameters())
    check_optimizer(optimizer, 0, "32-true")
    for stage in (1, 2, 3):
        with pytest.raises(MisconfigurationException, match=f"`{cls.__name__}` computes .* gradients of others"):
            check_optimizer(optimizer, stage, "32-true")


def test_states_of_no_parameter_are_refused() -> None:
    optimizer = Counts(nn.Linear(3, 2).parameters())
    check_optimizer(optimizer, 0, "32-true")
    for stage in (1, 2, 3):
        with pytest.raises(
            MisconfigurationException, match=f"`Counts` keeps states that belong to no .* stage {stage}"
        ):
            check_optimizer(optimizer, stage, "32-true")
    assert not optimizer.state


class ClipsSeldom(Lion):
    """Clips each tensor by its norm, but not within the first thousand steps."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                steps = self.state[param]["steps"] = self.state[param].get("steps", 0) + 1
                param.grad.mul_(1.0 if steps < 1000 else 1 / max(1.0, float(param.grad.norm())))
                if steps < 1000:
                    param.grad.norm()
        return super().step(closure)


def test_an_optimizer_that_reduces_a_tensor_gets_it_whole() -> None:
    assert needs_whole_tensors(ClipsSeldom(nn.Linear(3, 2).parameters()))


class Wraps(Lion):
    """Wraps another optimizer, as those of pytorch_optimizer do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.wrapped = optimizer

    @property  # type: ignore[override]
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.wrapped.param_groups

    @property  # type: ignore[override]
    def state(self) -> Any:  # type: ignore[override]
        return self.wrapped.state


def test_a_wrapper_with_properties_is_refused() -> None:
    optimizer = Wraps(torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.1))
    for stage in range(4):
        with pytest.raises(MisconfigurationException, match="`Wraps` shows the `param_groups` of an optimizer that it"):
            check_optimizer(optimizer, stage, "32-true")


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_collectives_within_a_step_are_refused(stage: int) -> None:
    class Gathers(Lion):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            torch.distributed.all_reduce(self.param_groups[0]["params"][0].grad)
            return super().step(closure)

    optimizer = Gathers(nn.Linear(3, 2).parameters())
    with pytest.raises(MisconfigurationException, match="`Gathers` calls collectives in its step"):
        check_optimizer(optimizer, stage, "32-true")
