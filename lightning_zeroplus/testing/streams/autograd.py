"""Autograd's stream semantics on a simulated device.

As on CUDA:

- A node, and the hooks of its tensors, run on the stream that was current when the forward made the node.
- A node's stream waits for the streams of the nodes that make its gradients.
- Several gradients for one input are summed on the stream of the node that takes them.
- At the end, and before the final callbacks, the stream that called the backward waits for the streams of all leaves.
- The first operation that uses a parameter makes the parameter's node, which lives as long as some graph does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_zeroplus.testing.streams.clocks import Device, Stream, running_node

_SUM = "aten::add"


def tag_nodes(device: Device, outputs: Any) -> None:
    """Record the current stream for every new node behind these outputs of a call."""
    stack = [(leaf.grad_fn, device.current) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    while stack:
        node, stream = stack.pop()
        if node is None or device.is_tagged(node):
            continue
        stream = device.stream_of(node) or stream
        device.tag(node, stream)
        # An untagged node behind a custom function's node was made by that function.
        stack.extend((successor, stream) for successor, _ in node.next_functions)


class FunctionMode(TorchFunctionMode):
    """Tags the nodes that functions of torch make, and reports functions that give the host a tensor's values.

    Args:
        device: The simulated device.
        host_read: Called with the function's name and the tensor. On CPU no dispatch mode sees these functions.
    """

    def __init__(self, device: Device, host_read: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._device = device
        self._host_read = host_read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            tag_nodes(self._device, output)
        if func in (Tensor.tolist, Tensor.numpy):
            self._host_read(f"Tensor.{func.__name__}", args[0])
        return output


def custom_node_maker(device: Device) -> Callable[[Any], None]:
    """An ``__init__`` for the nodes of custom functions, which no function mode sees. It stores the current stream."""

    def init(node: Any) -> None:
        node.simulated_stream = device.current

    return init


class _Sum(NamedTuple):
    producer: Any
    stream: Stream


class _Backward:
    """One run of the engine.

    Args:
        device: The simulated device.
        record: Called with a gradient and its consumer's stream, if another stream made it.
        roots: The nodes where it starts.
        captured: The nodes whose gradients are returned.
        restricted: Whether only some nodes run.
    """

    def __init__(
        self,
        device: Device,
        record: Callable[[Tensor, Stream], None],
        roots: list[tuple[Any, int]],
        captured: set[Any],
        restricted: bool,
    ) -> None:
        self._device = device
        self._record = record
        self._captured = captured
        self._restricted = restricted
        self.caller = device.current
        self._leaves: set[Stream] = set()
        self._filled: set[tuple[Any, int]] = set()
        self.sums: deque[_Sum] = deque()
        self._handles = [
            node.register_hook(self._after(node))
            for node in _reachable([node for node, _ in roots])
            if _passes_on(node)
        ]
        for root, index in roots:
            self._give(root, index, self.caller)

    def _after(self, node: Any) -> Callable[[Any, Any], None]:
        def hand_over(grads: tuple[Tensor | None, ...], _: Any) -> None:
            producer = self._stream_of(node)
            for grad, (taker, index) in zip(grads, node.next_functions, strict=False):
                if grad is None or taker is None or not self._runs(taker):
                    continue
                stream = self._stream_of(taker)
                if stream is not producer:
                    self._record(grad, stream)
                if (taker, index) in self._filled:
                    self.sums.append(_Sum(node, stream))
                self._give(taker, index, producer)

        return hand_over

    def _runs(self, node: Any) -> bool:
        if not self._restricted or node in self._captured:
            return True
        # Of the leaves only the captured ones run; torch does not answer for the others.
        return bool(node.next_functions) and torch._C._will_engine_execute_node(node)

    def _give(self, taker: Any, index: int, producer: Stream) -> None:
        stream = self._stream_of(taker)
        if stream is not producer:
            stream.join(producer.clock)
        self._filled.add((taker, index))
        if not taker.next_functions or taker in self._captured:
            self._leaves.add(stream)

    def _stream_of(self, node: Any) -> Stream:
        return self._device.stream_of(node) or self.caller

    def end(self) -> None:
        """Let the caller's stream wait for the leaves' streams."""
        while self._leaves:
            self.caller.join(self._leaves.pop().clock)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _passes_on(node: Any) -> bool:
    return any(successor is not None for successor, _ in node.next_functions)


def _reachable(roots: list[Any]) -> Iterator[Any]:
    seen: set[Any] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(successor for successor, _ in node.next_functions)
            yield node


class SimulatedEngine:
    """Stands in for ``Variable._execution_engine``: the real engine, with streams.

    Args:
        engine: The real engine.
        device: The simulated device.
        mode: Active within the backward.
        record: Called with a gradient and another stream that takes it, where autograd calls ``record_stream``.
    """

    def __init__(
        self, engine: Any, device: Device, mode: FunctionMode, record: Callable[[Tensor, Stream], None]
    ) -> None:
        self._engine = engine
        self._device = device
        self._mode = mode
        self._record = record
        self._running: list[_Backward] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(
        self, tensors: Any, grads: Any, keep: bool, create: bool, inputs: Any = (), *args: Any, **kwargs: Any
    ) -> Any:
        """Run the real engine's ``run_backward``, with streams."""
        captured = {node for node, _ in _edges(inputs)}
        roots = list(_edges(tensors))
        run = _Backward(self._device, self._record, roots, captured, bool(inputs))
        self._running.append(run)
        try:
            # The nodes of a nested backward do not belong to the node that calls it. And torch turns a mode off within
            # a function that the mode intercepts, such as Tensor.backward.
            with self._device.on(run.caller), self._mode:
                result = self._engine.run_backward(tensors, grads, keep, create, inputs, *args, **kwargs)
            run.end()
            return result
        finally:
            self._running.pop()
            run.close()

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Queue a final callback. It runs on the caller's stream, after the wait for the leaves."""
        if not self._running:
            self._engine.queue_callback(callback)  # raises
        run = self._running[-1]

        def on_caller() -> None:
            run.end()
            with self._device.on(run.caller):
                callback()

        self._engine.queue_callback(on_caller)

    def stream_of_sum(self, name: str) -> Stream | None:
        """The stream of an operator if it is the engine's own sum of two gradients, else None."""
        sums = self._running[-1].sums if self._running else None
        if not sums or not name.startswith(_SUM) or running_node() is not sums[0].producer:
            return None
        return sums.popleft().stream


def _edges(tensors: Any) -> Iterator[tuple[Any, int]]:
    for each in tensors:
        if isinstance(each, Tensor):
            if not each.requires_grad:
                continue  # the real engine will raise
            each = torch.autograd.graph.get_gradient_edge(each)
        yield each.node, each.output_nr
