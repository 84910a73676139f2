"""A gradient has the dtype that its parameter expects, whichever dtype a backward kernel gives it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zeroplus.precision.grad_dtype import expected_grad_dtype, normalized, supports_grad_dtype
from tests.compile.training import config, full

WIDTH = 16

needs_grad_dtype = pytest.mark.skipif(not supports_grad_dtype(), reason="this torch has no Tensor.grad_dtype")


def test_the_default_is_the_parameters_dtype() -> None:
    param = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    assert expected_grad_dtype(param) is torch.bfloat16
    assert normalized(torch.ones(3), param).dtype is torch.bfloat16


@needs_grad_dtype
@pytest.mark.parametrize(("asked", "found"), [(torch.float32, torch.float32), (None, torch.float16)])
def test_what_was_asked_for(asked: torch.dtype | None, found: torch.dtype) -> None:
    param = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    param.grad_dtype = asked
    assert normalized(torch.ones(3, dtype=torch.float16), param).dtype is found


def test_a_gradient_of_the_right_dtype_is_not_copied() -> None:
    param, grad = nn.Parameter(torch.zeros(3)), torch.ones(3)
    assert normalized(grad, param) is grad


@torch.library.custom_op("zeroplus_tests::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


@_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return grad @ weight, grad.float().t() @ x.float()  # fp32, whatever the weight's dtype


_linear.register_autograd(_linear_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _linear_backward(ctx, grad)


class Net(nn.Module):
    """Two layers, whose weights have fp32 gradients and whose biases have bf16 ones."""

    def __init__(self, op: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op = op
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(2))
        self.biases = nn.ParameterList(torch.zeros(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        linear = _linear if self.op == "custom_op" else _Function.apply
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = torch.tanh(linear(x, weight) + bias)
        return x.float().square().mean()


def _train(stage: int, op: str, compiled: bool, accumulate_dtype: torch.dtype | None) -> list[Tensor]:
    import deepspeed

    from lightning_zeroplus.engine.engine import build_engine

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    options = config(stage) | {"bf16": {"enabled": True}}
    if accumulate_dtype is not None:
        options |= {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    model = Net(op).bfloat16()
    engine = build_engine(
        model, torch.optim.SGD(model.parameters(), lr=0.5), options, accumulate_dtype=accumulate_dtype
    )
    if compiled:
        engine.compile(backend="eager")
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(3):
        engine.optimizer.zero_grad()
        for _ in range(2):
            engine.backward(engine(torch.randn(4, WIDTH, generator=generator).bfloat16()))
        engine.step()
    weights = [full(param).float() for param in model.parameters()]
    engine.destroy()
    return weights


def _difference(stage: int, op: str, accumulate_dtype: torch.dtype | None) -> float:
    """Between compiled graphs, whose gradients autograd does not see, and autograd, which casts them."""
    found, wanted = (_train(stage, op, compiled, accumulate_dtype) for compiled in (True, False))
    start = [param.detach().bfloat16().float() for param in Net(op).parameters()]
    moved = sum(float((a - b).square().sum()) for a, b in zip(wanted, start, strict=True)) ** 0.5
    return sum(float((a - b).square().sum()) for a, b in zip(found, wanted, strict=True)) ** 0.5 / moved


@pytest.mark.parametrize("op", ["custom_op", "function"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp32_gradients_of_bf16_parameters(ranks2: Any, stage: int, op: str) -> None:
    """To bf16's rounding of the weights: the graph may sum in another order."""
    assert max(ranks2.run(_difference, stage, op, None)) <= 1.5e-2


@needs_grad_dtype
@pytest.mark.parametrize("stage", [2, 3])
def test_they_stay_fp32_where_that_is_expected(ranks2: Any, stage: int) -> None:
    assert max(ranks2.run(_difference, stage, "custom_op", torch.float32)) <= 1.5e-2


def _refused() -> str:
    with pytest.raises(ValueError) as error:
        _train(1, "function", True, torch.float32)
    return str(error.value)


@needs_grad_dtype
def test_fp32_accumulation_is_not_compiled_at_stage_1(ranks2: Any) -> None:
    for message in ranks2.run(_refused):
        assert "Use stage 2" in message
