"""Where the nodes of a backward run, and whom they wait for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_zeroplus.testing.streams import Stream, StreamSanitizer


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def forward(sanitizer: StreamSanitizer, side: Stream, x: Tensor, function=lambda x: x * 2) -> Tensor:
    """``function`` on the side stream, correctly joined."""
    side.wait_stream(sanitizer.device.current)
    with sanitizer.on(side):
        y = function(x)
    sanitizer.device.current.wait_stream(side)
    return y


def streams_of(sanitizer: StreamSanitizer, node: str) -> set[str]:
    return {kernel.stream.name for kernel in sanitizer.device.kernels if kernel.name.endswith(f" in {node}")}


@pytest.mark.parametrize(("function", "node"), [(torch.sin, "SinBackward0"), (Double.apply, "DoubleBackward")])
def test_a_node_runs_on_the_stream_of_its_forward(function, node) -> None:
    with StreamSanitizer() as sanitizer:
        weight = torch.ones(3, requires_grad=True)
        forward(sanitizer, sanitizer.stream("side"), weight * 3, function).exp().sum().backward()
    sanitizer.check()
    assert streams_of(sanitizer, node) == {"side"}
    assert streams_of(sanitizer, "ExpBackward0") == streams_of(sanitizer, "MulBackward0") == {"default"}


def test_every_hook_of_a_tensor_runs_on_its_stream() -> None:
    seen = []
    with StreamSanitizer() as sanitizer:
        weight = torch.ones(3, requires_grad=True)
        weight.register_hook(lambda _: seen.append(sanitizer.device.current.name))
        weight.register_post_accumulate_grad_hook(lambda _: seen.append(sanitizer.device.current.name))
        y = forward(sanitizer, sanitizer.stream("side"), weight)
        y.register_hook(lambda _: seen.append(sanitizer.device.current.name))
        y.sum().backward()
        assert sanitizer.device.current.name == "default"
    assert seen == ["side", "side", "side"]


def test_a_parameter_keeps_the_stream_of_its_first_use_while_a_graph_lives() -> None:
    seen = []
    with StreamSanitizer() as sanitizer:
        side = sanitizer.stream("side")
        weight = torch.ones(3, requires_grad=True)
        weight.register_post_accumulate_grad_hook(lambda _: seen.append(sanitizer.device.current.name))
        for keep in (True, False):
            kept = weight.view(3) if keep else None
            forward(sanitizer, side, weight).sum().backward()
            del kept
    assert seen == ["default", "side"]


def test_hooks_may_choose_another_stream() -> None:
    with StreamSanitizer() as sanitizer:
        other = sanitizer.stream("other")
        weight = torch.ones(3, requires_grad=True)

        def hook(param: Tensor) -> None:
            with sanitizer.on(other):
                assert sanitizer.device.current is other
            assert sanitizer.device.current.name == "side"

        weight.register_post_accumulate_grad_hook(hook)
        forward(sanitizer, sanitizer.stream("side"), weight).sum().backward()


def test_gradients_are_summed_on_the_stream_that_takes_them() -> None:
    with StreamSanitizer() as sanitizer:
        side = sanitizer.stream("side")
        weight = torch.ones(3, requires_grad=True)
        x = weight * 2  # on the default stream, and takes the gradients of both branches
        (
            forward(sanitizer, side, x, torch.sin) + forward(sanitizer, sanitizer.stream("other"), x, torch.cos)
        ).sum().backward()
    sanitizer.check()
    (total,) = (kernel for kernel in sanitizer.device.kernels if kernel.name.startswith("aten::add in "))
    assert total.name in ("aten::add in SinBackward0", "aten::add in CosBackward0")  # who comes second
    assert total.stream.name == "default"
    producers = [kernel for kernel in sanitizer.device.kernels if kernel.name.startswith("aten::mul in ")]
    assert {"side", "other"} <= {kernel.stream.name for kernel in producers if total.is_after(kernel)}


@pytest.mark.parametrize("of", ["grad", "param.grad"])
def test_the_caller_waits_for_the_leaves(of: str) -> None:
    with StreamSanitizer() as sanitizer:
        weight = torch.ones(3, requires_grad=True)
        loss = forward(sanitizer, sanitizer.stream("side"), weight).sum()
        if of == "grad":
            (grad,) = torch.autograd.grad(loss, [weight])
        else:
            loss.backward()
            grad = weight.grad
        grad.mul_(2)  # on the default stream, without another wait
    sanitizer.check()


def test_another_stream_than_the_caller_does_not_wait() -> None:
    with StreamSanitizer() as sanitizer:
        weight = torch.ones(3, requires_grad=True)
        user = sanitizer.stream("user")
        loss = forward(sanitizer, sanitizer.stream("side"), weight).sum()
        user.wait_stream(sanitizer.device.current)
        with sanitizer.on(user):
            loss.backward()
        weight.grad.mul_(2)
    assert [race.second.operation for race in sanitizer.races] == ["aten::mul_"]


def test_final_callbacks_run_on_the_caller_after_the_leaves() -> None:
    with StreamSanitizer() as sanitizer:
        weight = torch.ones(3, requires_grad=True)
        engine = torch.autograd.Variable._execution_engine
        seen = []

        def callback() -> None:
            seen.append(sanitizer.device.current.name)
            weight.grad.mul_(2)

        weight.register_post_accumulate_grad_hook(lambda _: engine.queue_callback(callback))
        forward(sanitizer, sanitizer.stream("side"), weight).sum().backward()
    sanitizer.check()
    assert seen == ["default"]


def test_a_backward_within_a_backward_returns_to_the_streams_of_the_outer_one() -> None:
    seen = []
    with StreamSanitizer() as sanitizer:
        side = sanitizer.stream("side")
        inner = torch.ones(3, requires_grad=True)
        outer = torch.ones(3, requires_grad=True)

        def hook(_: Tensor) -> None:
            seen.append(sanitizer.device.current.name)
            with torch.enable_grad():
                forward(sanitizer, sanitizer.stream("inner"), inner).sum().backward()
            seen.append(sanitizer.device.current.name)

        outer.register_post_accumulate_grad_hook(hook)
        inner.register_post_accumulate_grad_hook(lambda _: seen.append(sanitizer.device.current.name))
        forward(sanitizer, side, outer).sum().backward()
    sanitizer.check()
    assert seen == ["side", "inner", "side"]


def test_only_nodes_that_run_are_waited_for() -> None:
    """With ``inputs``, a node that gets no gradient does not make its stream wait."""
    with StreamSanitizer() as sanitizer:
        side = sanitizer.stream("side")
        weight, frozen = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        y = forward(sanitizer, side, frozen)
        loss = (weight * y).sum()
        side_clock = dict(side.clock)
        loss.backward(inputs=[weight])
        assert side.clock == side_clock
        assert get_gradient_edge(frozen).node is not None and frozen.grad is None
