"""The part of an engine that exchanges its optimizers in the middle of a fit, or gives them further parameters.

Upstream's optimizers partition the parameters that are trainable when they are built. Others would never be updated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_zeroplus.engine.optimizer.anew.exchange import Exchange, refuse_new, refuse_now
from lightning_zeroplus.engine.optimizer.anew.partitions import is_partitioned
from lightning_zeroplus.engine.optimizer.chain import params_of
from lightning_zeroplus.engine.optimizer.groups import ShownGroup


class ExchangesOptimizers:
    """Mixin for the engine: see :class:`.Exchange`."""

    stepping: bool
    gradient_accumulation: Any
    user_groups: Any

    def rebuild(self: Any, new_group: dict[str, Any] | None = None, part: int = 0) -> None:
        """Make new partitions for all parameters of the user's groups that are trainable now; a collective.

        The optimizers stay the same objects.

        Args:
            new_group: A group to add to a torch optimizer.
            part: The number of this optimizer.

        Raises:
            ValueError: If the group has a parameter twice, or one that came into the module during the fit, or that
                another group of the optimizer has; nothing was changed.
            RuntimeError: Within a window, or if the engine is compiled; nothing was changed.
        """
        refuse_now(self, "A parameter became trainable", "Unfreeze it, or add its group,")
        if new_group is not None:
            if not isinstance(new_group["params"], Tensor):
                new_group["params"] = list(new_group["params"])
            refuse_new(self, params_of(new_group), "add_param_group()")
            self._refuse_twice(new_group, part)
        group = None if new_group is None else (new_group, part)
        Exchange(self, self.shown_optimizers(), group).run()

    def _refuse_twice(self, group: dict[str, Any], part: int) -> None:
        chain, groups = self.gradient_accumulation.chain, self.user_groups.params
        if chain is not None:
            groups = [params for _, params in chain.groups_of_users(part, groups)]
        added = [id(param) for param in params_of(group)]
        if len(set(added)) < len(added):
            raise ValueError(
                "`add_param_group()`: the group has a parameter twice, and would step it twice. Give each parameter"
                " once: `list(dict.fromkeys(params))`."
            )
        if not set(added).isdisjoint(id(param) for params in groups for param in params):
            raise ValueError(
                "`add_param_group()`: some parameters of the group are in another group of this optimizer."
            )

    def keep_states_of(self: Any, names: Collection[str]) -> None:
        """Let the optimizers have states of parameters that are frozen, as if they had been trained; a collective.

        Args:
            names: Their names. They are in the user's groups.

        Raises:
            RuntimeError: If the engine is compiled; nothing was changed.
        """
        if not names:
            return
        if is_partitioned(self):
            what = f"A checkpoint with optimizer states of frozen parameters, such as {min(names)!r},"
            refuse_now(self, what, "Leave them trainable, or export the weights and start from these,")
        self.user_groups.trained |= {param for name, param in self.module.named_parameters() if name in names}
        if is_partitioned(self):
            self.rebuild()

    def assign_groups(self: Any, groups: Sequence[Mapping[str, Any]], part: int) -> None:
        """Give a torch optimizer other groups; a collective. States of parameters that stay are kept.

        Args:
            groups: The groups, with the module's parameters.
            part: The number of the optimizer.

        Raises:
            ValueError: If a parameter came into the module during the fit, or is there twice; nothing was changed.
            RuntimeError: Within a window or a step, or if the engine is compiled; nothing was changed.
        """
        what = "`optimizer.param_groups` with other parameters"
        refuse_now(self, what, "Make the groups")
        # A dict of the user's own stays his: upstream puts flat partitions into the real ones.
        given = [
            (group.real if isinstance(group, ShownGroup) else dict(group), list(group["params"])) for group in groups
        ]
        params = [param for _, own in given for param in own]
        refuse_new(self, params, "optimizer.param_groups")
        if len(set(map(id, params))) < len(params):
            raise ValueError("`optimizer.param_groups`: a parameter is in several groups, or twice in one.")
        Exchange(self, self.shown_optimizers(), groups=(given, part)).run()

    def adopt_edited_groups(self: Any) -> None:
        """Before a forward or a step: what the user has done to the lists that he got from an optimizer counts."""
        if self.user_groups is not None:
            edited = self.user_groups.edited()
            if edited is not None:
                self.assign_groups(edited[1], edited[0])
                edited[1].note()

    def replace_optimizers(self: Any, optimizers: Sequence[Any], what: str = "`trainer.optimizers = ...`") -> list[Any]:
        """Let other optimizers update the parameters; a collective.

        Those that the engine has already keep their states. Others are torch optimizers. One that the engine had before
        has its states again.

        Args:
            optimizers: All that the user will step.
            what: What the user has called, for messages.

        Returns:
            What the user steps, in the order of ``optimizers``.

        Raises:
            ValueError: If one has a parameter that came into the module during the fit; nothing was changed.
            RuntimeError: Within a window or a step, or if the engine is compiled; nothing was changed.
        """
        refuse_now(self, what, "Make all optimizers")
        if self.stepping:
            raise RuntimeError(f"{what} within an optimizer step: exchange optimizers between two steps.")
        exchange = Exchange(self, optimizers)
        self.meet()  # forwards may have run since the last backward
        return exchange.run()
