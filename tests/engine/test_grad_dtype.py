"""A gradient has the dtype that its parameter expects, whichever dtype a backward kernel gives it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_zeroplus.gradients.dtype import expected_grad_dtype, normalized
from lightning_zeroplus.gradients.ranks import gloo
from lightning_zeroplus.precision.zero import ZeroPlusPrecision
from tests.engine.compile.training import config, full
from tests.support.training import Classifier, loader, trainer, zero_plus

WIDTH = 16


def test_the_default_is_the_parameters_dtype() -> None:
    param = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    assert expected_grad_dtype(param) is torch.bfloat16
    assert normalized(torch.ones(3), param).dtype is torch.bfloat16


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

    from lightning_zeroplus.engine.build import build_engine

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


@pytest.mark.sampled
@pytest.mark.parametrize("op", ["custom_op", "function"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp32_gradients_of_bf16_parameters(ranks2: Any, stage: int, op: str) -> None:
    """To bf16's rounding of the weights: the graph may sum in another order."""
    assert max(ranks2.run(_difference, stage, op, None)) <= 1.5e-2


@pytest.mark.parametrize("stage", [2, 3])
def test_they_stay_fp32_where_that_is_expected(ranks2: Any, stage: int) -> None:
    assert max(ranks2.run(_difference, stage, "custom_op", torch.float32)) <= 1.5e-2


def _refused() -> str:
    with pytest.raises(ValueError) as error:
        _train(1, "function", True, torch.float32)
    return str(error.value)


def test_fp32_accumulation_is_not_compiled_at_stage_1(ranks2: Any) -> None:
    for message in ranks2.run(_refused):
        assert "Use stage 2" in message


# -- by parameter ----------------------------------------------------------------------------------------------------


class Emitting(torch.autograd.Function):
    """``x * weight``, whose weight gradient has a dtype of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad.float() * x.float()).sum(0).to(ctx.dtype), None


class Mixed(nn.Module):
    """Weights that take no part in each other's gradients, each with a gradient of another dtype."""

    names = ("narrow", "wide", "free", "free_fp16", "asked")

    def __init__(self) -> None:
        super().__init__()
        for name in self.names:
            setattr(self, name, nn.Parameter(torch.linspace(-1, 1, WIDTH)))
        self.asked.grad_dtype = torch.float32  # the model's own wish

    def forward(self, x: Tensor, use: tuple[str, ...]) -> Tensor:
        emits = {name: torch.float16 if name == "free_fp16" else torch.float32 for name in self.names}
        return sum(Emitting.apply(x, getattr(self, name), emits[name]).float().sum() for name in use)


#: What each weight's gradient is rounded to before it is reduced.
EXPECTED = {
    "narrow": torch.bfloat16,
    "wide": torch.float32,
    "free": torch.float32,
    "free_fp16": torch.float16,
    "asked": torch.float32,
}
BACKWARDS = 3


def _inputs(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, WIDTH, generator=generator).bfloat16() for _ in range(BACKWARDS)]


def _wanted(name: str) -> Tensor:
    """The averaged gradient: rounded per backward, then summed in at least what it was rounded to."""
    sums = [sum(x.float().sum(0).to(EXPECTED[name]).float() for x in _inputs(rank)) for rank in range(2)]
    return (sums[0] + sums[1]) / 2


def _masters(engine: Any) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    if engine.zero_optimization_stage():
        return {name: safe_get_full_fp32_param(param).clone() for name, param in engine.module.named_parameters()}
    return {
        name: param.detach().clone() for name, param in zip(Mixed.names, engine.optimizer.fp32_groups[0], strict=True)
    }


def _reduced(stage: int, loop: str, options: dict[str, Any]) -> tuple[dict[str, float], set[torch.dtype]]:
    """How far each weight's update is off, and in which dtypes gradients were reduced."""
    import deepspeed

    from lightning_zeroplus.engine.build import build_engine
    from lightning_zeroplus.strategy.common.window import GradientWindow

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    settings = config(stage) | {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}} | options
    if stage == 0:
        del settings["data_types"]
    model = Mixed()
    # Upstream's all-reduce at stage 0 refuses dtypes that the accelerator lacks, and this one has no fp16.
    used = tuple(name for name in Mixed.names if stage or name != "free_fp16")
    engine = build_engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        settings,
        grad_dtypes={"narrow": torch.bfloat16, "wide": torch.float32, "free": None, "free_fp16": None},
    )
    wire: set[torch.dtype] = set()
    backend = deepspeed.comm.comm.cdb
    originals = {name: getattr(backend, name) for name in ("all_reduce", "reduce", "reduce_scatter_tensor")}
    ours = {name: getattr(gloo.reduction, name) for name in ("reduce_parts", "add_parts")}

    def noted(original: Any, at: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = [*args, *kwargs.values()][at]
            tensor = tensor if isinstance(tensor, Tensor) else tensor[0]
            if tensor.is_floating_point() and not engine.updating:
                wire.add(tensor.dtype)
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(backend, name, noted(original, 1 if name == "reduce_scatter_tensor" else 0))
    for name, original in ours.items():
        setattr(gloo.reduction, name, noted(original, 0))
    try:
        start = _masters(engine)
        engine.optimizer.zero_grad()
        backwards = [lambda x=x: engine.backward(engine(x, used)) for x in _inputs(torch.distributed.get_rank())]
        window = GradientWindow(lambda: engine)
        engine.gradient_accumulation.guard = window
        if loop == "each":
            for backward in backwards:
                backward()
        else:
            with window.coalesce(BACKWARDS if loop == "last overlaps" else None, None):
                for backward in backwards:
                    backward()
        engine.step()
        after = _masters(engine)
    finally:
        for name in originals:
            delattr(backend, name)
        for name in ours:
            delattr(gloo.reduction, name)
    engine.destroy()
    off = {}
    for name in used:
        want = _wanted(name)
        off[name] = float((start[name] - after[name] - want).abs().max() / want.abs().max())
    return off, wire


#: The largest error of a sum of six gradients in a dtype, and the least that tells it from a wider one.
BOUNDS = {torch.bfloat16: (2e-2, 5e-4), torch.float16: (2e-3, 2e-5), torch.float32: (1e-6, 0.0)}


@pytest.mark.parametrize("loop", ["each", "window", "last overlaps"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_parameter_has_its_own(ranks2: Any, stage: int, loop: str) -> None:
    """A backward gives fp32 or fp16; each weight's gradient is reduced and summed in the dtype that it is to have."""
    for off, wire in ranks2.run(_reduced, stage, loop, {}):
        for name, error in off.items():
            largest, least = BOUNDS[EXPECTED[name]]
            assert error <= largest, (name, off)
            # BF16_Optimizer, at stage 1, sums and reduces one flat fp32 gradient.
            assert error >= (0 if stage == 1 else least), (name, off)
        assert wire == ({torch.float32} if stage == 1 else {EXPECTED[name] for name in off})


# -- through the Trainer ---------------------------------------------------------------------------------------------


class Expecting(Classifier):
    """Notes what its gradients are to have, and what the partitions have; ``asks`` sets one ``grad_dtype`` itself."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__(scheduler=None)
        if asks:
            self.net[0].bias.grad_dtype = torch.float32

    def on_train_start(self) -> None:
        self.expected = {name: expected_grad_dtype(param) for name, param in self.net.named_parameters()}
        self.stored = self.trainer.strategy.model.optimizer.gradient_accumulation_dtype


def _expected(precision: str, asks: bool, **arguments: Any) -> tuple[dict[str, Any], torch.dtype]:
    module = Expecting(asks)
    run = trainer(zero_plus(2), plugins=[ZeroPlusPrecision(precision, **arguments)], max_steps=2)
    run.fit(module, loader())
    return module.expected, module.stored


def test_patterns(ranks2: Any) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32

    def by_name(first: Any, first_bias: Any, second: Any, second_bias: Any) -> dict[str, Any]:
        return {"0.weight": first, "0.bias": first_bias, "2.weight": second, "2.bias": second_bias}

    def expected(asks: bool = False, **arguments: Any) -> tuple[dict[str, Any], torch.dtype]:
        results = ranks2.run(partial(_expected, "bf16-true", asks, **arguments))
        assert results[0] == results[1]
        return results[0]

    assert expected() == (by_name(bf16, bf16, bf16, bf16), bf16)
    assert expected(asks=True) == (by_name(bf16, fp32, bf16, bf16), fp32)
    assert expected(accumulate_dtype=fp32) == (by_name(fp32, fp32, fp32, fp32), fp32)
    wanted = {"accumulate_dtype": {"net.2.*": fp32}, "grad_dtype": {"*.2.bias": None, "*": bf16}}
    assert expected(accumulate_dtype={"net.2.*": fp32}) == (by_name(bf16, bf16, fp32, fp32), fp32)
    assert expected(asks=True, **wanted) == (by_name(bf16, bf16, bf16, None), fp32)


def test_bad_patterns() -> None:
    module = Classifier()
    for arguments in (
        {"grad_dtype": torch.float64},
        {"grad_dtype": {"*": "bf16"}},
        {"accumulate_dtype": torch.bfloat16},
    ):
        with pytest.raises(MisconfigurationException, match=f"{next(iter(arguments))}=.*by pattern"):
            ZeroPlusPrecision("bf16-true", **arguments)
    with pytest.raises(MisconfigurationException, match=r"'weight' matches none of the 4 .* \(net.0.weight"):
        ZeroPlusPrecision("bf16-true", grad_dtype={"weight": None}).grad_dtypes(module)


def _given_twice() -> str:
    strategy = zero_plus(2, accumulate_dtype="float32")
    plugins = [ZeroPlusPrecision("bf16-true", accumulate_dtype={"*bias": torch.float32})]
    with pytest.raises(MisconfigurationException) as error:
        trainer(strategy, plugins=plugins).fit(Classifier(), loader())
    return str(error.value)


def test_accumulate_dtype_given_twice(ranks2: Any) -> None:
    assert all("Give it once" in message for message in ranks2.run(_given_twice))
