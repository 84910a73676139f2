"""DeepCompile's native extension (CUDA), whose gradients go to the engine's reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from lightning_zeroplus.engine.compile.patches import Patches


class NativeHandle:
    """The extension, with ``reduce_grad`` replaced until ``patches`` are undone, and with :meth:`invalidate`.

    The native operator keeps a flag per graph and parameter that says whether to add or to overwrite, and clears it at
    the end of the graph's own backward. If a graph runs twice, only the gradient of the last run would remain.

    Args:
        native: The extension.
        receive: Takes the id of a parameter and a full gradient, of one graph in this backward.
        patches: Undoes the replacement.
    """

    def __init__(self, native: Any, receive: Callable[[int, Tensor], None], patches: Patches) -> None:
        self._native = native
        self._receive = receive
        self._graphs: set[int] = set()
        library = Library("dc", "IMPL")
        library.impl("reduce_grad", self._reduce_grad, "CUDA", allow_override=True)
        patches.call_later(library._destroy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def register_graph_z3(self, graph_id: int, ids: list[int]) -> None:
        """Register a graph, and remember it for :meth:`invalidate`."""
        self._native.register_graph_z3(graph_id, ids)
        self._graphs.add(graph_id)

    def reset(self) -> None:
        """Forget the graphs: they will be compiled anew."""
        self._native.reset()
        self._graphs.clear()

    def cleanup(self) -> None:
        """Forget graphs and parameters."""
        self._native.cleanup()
        self._graphs.clear()

    def invalidate(self) -> None:
        """Let every parameter be gathered anew, also those that stay gathered.

        The extension itself does so at the end of a graph's backward only. A forward between the last backward and a
        step, or a load, gathers them again, and would leave them as they were before.
        """
        self._native.start_backward(True)
        for graph_id in sorted(self._graphs):
            torch.ops.dc.end_backward(None, graph_id, False)

    def start_backward(self, update: bool) -> None:
        """Let parameters that stay gathered be gathered again after every backward: a step may follow each."""
        self._native.start_backward(True)

    def _reduce_grad(self, a: Tensor, graph_id: int, id: int) -> Tensor:
        if not self._native.is_profiling():
            self._receive(id, a)
        return a.new_empty(0)
