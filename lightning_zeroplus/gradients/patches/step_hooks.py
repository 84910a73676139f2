"""The hooks that users register on a torch optimizer: before and after its step, as under DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

_KINDS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@contextmanager
def users_step_hooks(engine: Any, part: int | None, shown: Any, closure: Any) -> Iterator[None]:
    """Call the user's hooks before and after what happens within, and not in the torch optimizer's own step.

    There, torch would call them after the closure, and only where a partition has gradients. They would see partitions,
    and upstream would overwrite what they write to the module's weights.

    Args:
        engine: The engine that steps within.
        part: The number of the optimizer, where there are several.
        shown: What the hooks are given as the optimizer: its groups have the module's parameters.
        closure: What ``step()`` was given; None: nothing.

    Raises:
        RuntimeError: If a hook returns other arguments for the step.
    """
    optimizer = engine.basic_optimizer if part is None else engine.gradient_accumulation.chain.parts[part]
    before, after = (getattr(optimizer, kind, None) or {} for kind in _KINDS)
    kwargs = {} if closure is None else {"closure": closure}
    for hook in _users(before).values():
        if hook(shown, (shown,), kwargs) is not None:
            raise RuntimeError(
                "A hook of `register_step_pre_hook()` has returned other arguments for `optimizer.step()`. Under ZeRO"
                " the engine steps, and gives none. Let the hook return None."
            )
    with without_users_step_hooks([optimizer]):
        yield
    if not getattr(engine.optimizer, "overflow", False):  # as torch's GradScaler, which does not step then
        for hook in _users(after).values():
            hook(shown, (shown,), kwargs)


@contextmanager
def without_users_step_hooks(optimizers: Iterable[Any]) -> Iterator[None]:
    """Call no hook of the user's within: upstream steps torch optimizers when it is built, to make their states."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            for kind in _KINDS:
                stack.enter_context(_without_users(getattr(optimizer, kind, None) or {}))
        yield


def _users(hooks: MutableMapping[int, Any]) -> dict[int, Callable[..., Any]]:
    return {key: hook for key, hook in hooks.items() if not _is_ours(hook)}


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a partial
    return str(getattr(function, "__module__", "")).startswith(("lightning_zeroplus.", "deepspeed."))


@contextmanager
def _without_users(hooks: MutableMapping[int, Any]) -> Iterator[None]:
    taken = _users(hooks)
    for key in taken:
        del hooks[key]
    try:
        yield
    finally:
        hooks.update(taken)
