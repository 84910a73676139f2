"""Which backward autograd is running while a hook runs, and what is refused of ``param.grad``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_zeroplus.gradients.patches.transforms import outside_transforms

_will_execute: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)
_current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
#: The number of the backward that runs on this thread; nested backwards have their own; -1 outside of any.
current_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def accumulates(leaf: Tensor) -> bool:
    """Whether the running backward adds to ``leaf.grad``: ``torch.autograd.grad`` only returns the gradient.

    Both call the hooks of ``leaf.register_hook``. Relies on torch: ``_will_engine_execute_node`` raises for a leaf
    whose gradient is returned.

    Args:
        leaf: A leaf whose tensor hook is running.
    """
    return _is_reached(leaf) is not None


def reaches(leaf: Tensor) -> bool:
    """Whether the running backward will add to ``leaf.grad``; not if it only returns gradients."""
    return bool(_is_reached(leaf))


def _is_reached(leaf: Tensor) -> bool | None:
    if _will_execute is None:
        return True
    # Users' functions of a sharded weight gather it. Here nothing is computed.
    with torch.enable_grad(), outside_transforms(), torch._C.DisableTorchFunctionSubclass():
        node = leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    try:
        return _will_execute(node)
    except RuntimeError:
        return None


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the outermost backward of this thread is over. Must be called within a backward.

    Autograd's own callbacks belong to the running backward, which may be nested in another: a reentrant checkpoint runs
    one. When a nested backward ends, autograd is still evaluating the node that started it. The next node runs in the
    outer backward again, and queues the callback there.
    """

    def ended() -> None:
        following = [node for node, _ in getattr(_current_node(), "next_functions", ()) if node is not None]
        handles: list[Any] = []

        def queue(*unused: Any) -> None:
            for handle in handles:
                handle.remove()
            torch.autograd.Variable._execution_engine.queue_callback(ended)

        handles += [node.register_prehook(queue) for node in following]
        if not following:
            callback()

    torch.autograd.Variable._execution_engine.queue_callback(ended)


def makes_graph() -> bool:
    """Whether this runs in a backward with ``create_graph=True``; a second backward will need the weights again."""
    return current_task() != -1 and torch.is_grad_enabled()


def refuse_earlier_average(done: str = "read") -> NoReturn:
    """Refuse an access to ``param.grad`` in a backward, where it does not have what earlier ones have accumulated.

    Args:
        done: What was done with it, as a participle.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        f"`param.grad` was {done} in a hook within a backward. What was accumulated before is an average under DDP, and"
        " here it is averaged later, or each rank has a part of it. Do that after the backward; or in the parameter's"
        " own hook of `register_post_accumulate_grad_hook`, which sees all that the parameter has accumulated, in"
        " backwards of `self.manual_backward(loss)`."
    )


def refuse_both(done: str) -> NoReturn:
    """Refuse an access to a gradient that is averaged in part.

    Args:
        done: What was done with it, as a participle.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        f"`param.grad` was {done} in, or after, no_sync() or a coalesce() window that follows a backward outside of it."
        " Under DDP it is the sum of an average and of this rank's own gradient. ZeRO does not have that: the two are"
        " averaged together later. Do it before the window, or after the next backward outside of one."
    )


def refuse_late_read() -> NoReturn:
    """Refuse to read a gradient that the step has released.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        "`param.grad` was read after optimizer.step(), which has used up the gradient: ZeRO keeps no copy, if those of"
        " earlier steps were zeroed unread. Read it before the step, for example in `on_before_optimizer_step`. To drop"
        " gradients, call zero_grad()."
    )
