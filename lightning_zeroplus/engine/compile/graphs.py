"""Changes to graphs that upstream's passes need for correct results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import getitem
from typing import Any

import torch
from deepspeed.compile.util import get_real_uses
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node
from torch.fx.node import map_arg


@torch.library.custom_op("lightning_zeroplus::copied", mutates_args=())
def copied(grad: Tensor) -> Tensor:
    """A copy that Inductor cannot elide, unlike ``clone``: the reduction frees the tensor that it gets."""
    return grad.clone()


@copied.register_fake
def _(grad: Tensor) -> Tensor:
    return torch.empty_like(grad)


Requirements = Callable[[Node, Sequence[Node]], list[Node]]


def with_keyword_arguments(requirements: Requirements) -> Requirements:
    """A ``get_node_requirements`` that also follows keyword arguments, such as the ``attn_mask`` of an attention.

    Relies on upstream: ``requirements`` returns the nodes that a node needs through positional arguments, in an order
    in which they can run, with the node itself at the end and without nodes that are scheduled already.
    """

    def all_requirements(target: Node, scheduled: Sequence[Node]) -> list[Node]:
        known = set(scheduled)
        needed: dict[Node, None] = {}
        for node in requirements(target, scheduled):
            given: list[Node] = []
            map_arg(node.kwargs, given.append)
            for argument in given:
                if argument not in known and argument not in needed:
                    needed.update(dict.fromkeys(all_requirements(argument, [*scheduled, *needed])))
            needed.setdefault(node)
        return list(needed)

    return all_requirements


def users_of(params: Sequence[Node], graph: Graph) -> set[Node]:
    """The nodes after which upstream releases parameters: nodes that compute with them, and the outputs of these nodes.

    Args:
        params: The parameters that the graph gathers.
        graph: The graph of a backward.
    """
    uses = get_real_uses(graph)
    users = {user for param in params for user in uses[param]}
    return users | {part for user in users for part in user.users if part.target is getitem}


def isolate_gradient_nodes(graph: Graph, positions: Sequence[int], users: Collection[Node] = ()) -> None:
    """Copy gradients whose node is used otherwise, too: for another parameter, another gradient, or in ``users``.

    Upstream replaces every use of a gradient by the result of its reduction, which is empty. But the gradient of a
    ``BatchNorm``'s bias is also used for the gradient of its input, and two biases that are added share a gradient.

    If upstream releases a parameter after a node that is itself a gradient, the release of the reduction's empty result
    would replace the node in the graph's output, and autograd would get an empty gradient. Examples are the gradient of
    a weight penalty, and of the weight of a first ``LayerNorm``, whose input needs no gradient.

    Args:
        graph: The graph of a backward.
        positions: The positions of the parameters' gradients in the graph's output.
        users: The result of :func:`users_of`.
    """
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    taken = set(users)
    for position in positions:
        grad: Any = results[position]
        if not isinstance(grad, Node):
            continue
        if grad in taken or grad.op == "placeholder" or set(grad.users) != {output}:
            with graph.inserting_before(output):
                copy = graph.call_function(torch.ops.lightning_zeroplus.copied.default, (grad,))
            copy.meta = dict(grad.meta)
            results[position] = copy
        taken.add(grad)
    output.args = (tuple(results),)


@contextmanager
def keeping_inputs(graph: Graph, inputs: Sequence[Any]) -> Iterator[None]:
    """Undo what the graph writes to its inputs within: the passes profile a graph by running it.

    With Inductor, updates of buffers are part of the graph. The running statistics of a ``BatchNorm`` would be updated
    several times in the first step.

    Args:
        graph: The graph.
        inputs: The inputs with which the passes run it.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    written = {node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default}
    kept = [value for node, value in zip(placeholders, inputs, strict=False) if node in written]
    with unset_fake_temporarily(), torch.no_grad():
        before = [value.clone() for value in kept]
    try:
        yield
    finally:
        with unset_fake_temporarily(), torch.no_grad():
            for value, old in zip(kept, before, strict=True):
                value.copy_(old)


def drop_parameters_without_gradient(manager: Any, graph: Graph) -> None:
    """Drop a graph's parameters without gradient: upstream's pass for stages 1 and 2 assumes that all have one.

    Args:
        manager: Upstream's ``DSGraphParamManager`` of the graph.
        graph: The graph of a backward.
    """
    _, grads = manager.get_bwd_mapping(graph)
    kept = [at for at, name in enumerate(manager._param_names) if grads[name] is not None]
    manager._param_names = [manager._param_names[at] for at in kept]
    manager._param_indices = [manager._param_indices[at] for at in kept]
