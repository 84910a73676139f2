"""Optimizers as they are found in the wild, in few lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class _Own(Optimizer):
    """Steps parameter by parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group["lr"])
        return loss

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        """Move one parameter."""
        raise NotImplementedError


class Lion(_Own):
    """Chen et al., 2023: the sign of a moment; every element by itself."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        moment = state.setdefault("moment", torch.zeros_like(param))
        param.add_((0.9 * moment + 0.1 * grad).sign(), alpha=-lr)
        moment.lerp_(grad, 0.01)


class ForeachSigns(Optimizer):
    """The sign of a moment, for all tensors of a group at once."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            grads = [param.grad for param in params]
            moments = [self.state[param].setdefault("moment", torch.zeros_like(param)) for param in params]
            torch._foreach_lerp_(moments, grads, 0.1)
            torch._foreach_add_(params, torch._foreach_sign(moments), alpha=-group["lr"])
            last = [self.state[param].setdefault("last", torch.zeros_like(param)) for param in params]
            torch._foreach_copy_(last, moments)
        return loss


class LARS(_Own):
    """You et al., 2017: the learning rate of a tensor is the ratio of its norm and its gradient's."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        ratio = param.norm().clamp(min=1e-3) / grad.norm().clamp(min=1e-6)
        moment = state.setdefault("moment", torch.zeros_like(param))
        moment.mul_(0.5).add_(grad * ratio)
        param.add_(moment, alpha=-lr)


class LAMB(_Own):
    """You et al., 2019: LARS with Adam's update."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        first = state.setdefault("first", torch.zeros_like(param))
        second = state.setdefault("second", torch.zeros_like(param))
        first.lerp_(grad, 0.1)
        second.lerp_(grad.square(), 0.1)
        change = first / (second.sqrt() + 1e-3) + 0.01 * param
        param.add_(change * (param.norm().clamp(min=0.1) / change.norm().clamp(min=1e-6)), alpha=-lr)


class SOAP(_Own):
    """After Vyas et al., 2024: Adam in the eigenbasis of the gradients' row covariance."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        second = state.setdefault("second", torch.zeros_like(param))
        if param.dim() != 2:
            second.lerp_(grad.square(), 0.1)
            param.add_(grad / (second.sqrt() + 1e-2), alpha=-lr)
            return
        rows = len(param)
        covariance = state.setdefault("covariance", torch.diag(torch.arange(1.0, rows + 1)).to(param))
        covariance.lerp_(grad @ grad.T, 0.05)
        basis = torch.linalg.eigh(covariance).eigenvectors
        turned = basis.T @ grad
        second.lerp_(turned.square(), 0.1)
        param.add_(basis @ (turned / (second.sqrt() + 1e-2)), alpha=-lr)


class Adam8Bits(_Own):
    """After Dettmers et al., 2021: moments of large tensors in 8 bits, with a scale for each block of 256 elements."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        first = _read(state, "first", param).lerp(grad, 0.1)
        second = _read(state, "second", param).square().lerp(grad.square(), 0.1).sqrt()
        _write(state, "first", first)
        _write(state, "second", second)
        param.add_(first / (second + 1e-2), alpha=-lr)


def _read(state: dict[str, Any], key: str, like: Tensor) -> Tensor:
    if key not in state:
        return torch.zeros_like(like)
    if f"{key}_scales" not in state:
        return state[key]
    return (state[key].view(-1, 256) * (state[f"{key}_scales"][:, None] / 127)).view(like.shape)


def _write(state: dict[str, Any], key: str, value: Tensor) -> None:
    state[key] = value
    if value.numel() >= 4096 and value.numel() % 256 == 0:
        blocks = value.reshape(-1, 256)
        scales = state[f"{key}_scales"] = blocks.abs().amax(1)
        state[key] = (blocks / scales.clamp(min=1e-12)[:, None] * 127).round().to(torch.int8).view(value.shape)


class Wrapping(Adam8Bits):
    """As bitsandbytes' optimizers: `state_dict()` wraps states, and their dtype tells whether they are codes."""

    _WRAPPED = "__bnb_optimizer_quant_state__"

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        for key in ("first", "second"):
            if key in state and state[key].is_floating_point():
                state.pop(f"{key}_scales", None)
        super().update(param, grad, state, lr)

    def state_dict(self) -> dict[str, Any]:
        made = super().state_dict()
        made["state"] = {number: {self._WRAPPED: dict(state)} for number, state in made["state"].items()}
        return made

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        states = {number: {**each, **each.get(self._WRAPPED, {})} for number, each in state_dict["state"].items()}
        for state in states.values():
            state.pop(self._WRAPPED, None)
        super().load_state_dict({**state_dict, "state": states})
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            for key, value in states.get(number, {}).items():
                self.state[param][key] = value.clone() if isinstance(value, Tensor) else value


class WrappingLion(Wrapping):
    """The same with states in fp32, element by element."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        Lion.update(self, param, grad, state, lr)  # type: ignore[arg-type]


class Lookahead(Optimizer):
    """Zhang et al., 2019: slow weights that follow every second step of another optimizer."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, inner.defaults)
        self.slow: dict[Tensor, Tensor] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = self.inner.step(closure)
        self.count += 1
        with torch.no_grad():
            for param in (param for group in self.param_groups for param in group["params"]):
                slow = self.slow.setdefault(param, param.detach().clone())
                if self.count % 2 == 0:
                    param.copy_(slow.lerp_(param, 0.5))
        return loss
