"""What upstream's scheduler of gathers overlooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Node
from torch.fx.node import map_arg

Requirements = Callable[[Node, Sequence[Node]], list[Node]]


def with_keyword_arguments(requirements: Requirements) -> Requirements:
    """``get_node_requirements`` that sees keyword arguments, such as the ``attn_mask`` of an attention.

    Relies on upstream's giving, in an order in which they can run, the nodes that a node needs through positional
    arguments, itself at the end, without those that are scheduled already.
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
