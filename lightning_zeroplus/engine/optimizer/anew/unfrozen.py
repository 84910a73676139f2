"""Parameters that become trainable in the middle of a fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_zeroplus.engine.families.outside import AveragesOutside

if TYPE_CHECKING:
    from lightning_zeroplus.engine.host import EngineHost


class AdoptsUnfrozen(AveragesOutside):
    """The part of a gradient accumulation that looks for them.

    Attributes:
        frozen: The indices of the parameters that the user's optimizer has and upstream's has not: they were frozen
            when it was built.
    """

    engine: EngineHost
    params: list[nn.Parameter]
    index: dict[int, int]
    optimized: frozenset[int]
    frozen: frozenset[int]

    def _frozen_params(self) -> frozenset[int]:
        assert self.engine.user_groups is not None
        everything: Any = (param for group in self.engine.user_groups.params for param in group)
        some = (param for param in everything if getattr(param, "ds_numel", param.numel()))  # upstream drops empty ones
        return frozenset(self.index[id(param)] for param in some) - self.optimized

    def adopt_unfrozen(self) -> None:
        """Before a forward: make new partitions if one of them was unfrozen."""
        if self.frozen and any(self.params[index].requires_grad for index in self.frozen):
            self.engine.rebuild()

    def check_unfrozen(self) -> None:
        """Before a backward: refuse gradients for which there is no partition.

        Raises:
            RuntimeError: If one of them was unfrozen since the forward began: its gradient would be lost.
        """
        if not self.frozen or not any(self.params[index].requires_grad for index in self.frozen):
            return
        name = next(
            name
            for name, param in self.engine.module.named_parameters()
            if param.requires_grad and self.index[id(param)] in self.frozen
        )
        raise RuntimeError(
            f"The parameter {name!r} was unfrozen after the forward began. ZeRO has no partition for it yet: unfreeze"
            " it before `training_step`, for example in `on_train_batch_start`."
        )
