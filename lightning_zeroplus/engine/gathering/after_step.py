"""The weights of stages 1 and 2 after a step: each rank has updated its partition, and all ranks need all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor

from lightning_zeroplus.engine.upstream.probe import has
from lightning_zeroplus.gradients.patches.replacement import Replacement
from lightning_zeroplus.gradients.ranks import gloo


def _gathering(upstream: Callable[..., None]) -> Callable[..., None]:
    def gather(
        groups_flat: Sequence[Tensor],
        partitioned_param_groups: Sequence[Sequence[Tensor]],
        dp_process_group: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        groups = zip(groups_flat, partitioned_param_groups, dp_process_group, strict=True)
        if all(gloo.suits(group, flat.device) for flat, _, group in groups):
            for partitions, group in zip(partitioned_param_groups, dp_process_group, strict=True):
                gloo.gather_parts(partitions, group)  # views of the flat weights
        else:
            upstream(groups_flat, partitioned_param_groups, dp_process_group, *args, **kwargs)

    return gather


_FEATURE = "the gather of the weights after a step"
_replacements: list[Replacement] = [
    Replacement(module, "all_gather_dp_groups", _gathering(module.all_gather_dp_groups))
    for module in (stage_1_and_2, bf16_optimizer)
    if has(_FEATURE) and hasattr(module, "all_gather_dp_groups")
]


@contextmanager
def _faster() -> Iterator[None]:
    with ExitStack() as stack:
        for replacement in _replacements:
            stack.enter_context(replacement())
        yield


class GathersWeights:
    """Overrides on upstream's optimizers of stages 1 and 2; each calls ``super()``.

    Relies on upstream: ``step`` and ``update_lp_params`` call ``all_gather_dp_groups``, by that name in their own
    module. The partitions of each group are views of the group's flat weights.
    """

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Step; on gloo, gather the weights with a faster collective."""
        with _faster():
            return super().step(*args, **kwargs)  # type: ignore[misc]

    def update_lp_params(self: Any) -> None:
        """Copy the master weights to the module; on gloo, gather them with a faster collective."""
        with _faster():
            super().update_lp_params()  # type: ignore[misc]

    def _update_model_bit16_weights(self: Any, group_index: int) -> None:
        """Make the weights views of the flat ones; not in a step, which has brought them there before its update."""
        if not self.gradient_accumulation.engine.updating:
            super()._update_model_bit16_weights(group_index)  # type: ignore[misc]
