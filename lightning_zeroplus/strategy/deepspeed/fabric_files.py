"""Checkpoints of ZeroPlusFabricStrategy: a folder of DeepSpeed's for one model, which its engine writes and reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.load import _move_state_into
from lightning.fabric.utilities.types import _PATH
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

if TYPE_CHECKING:
    from lightning_zeroplus.engine.engine import ZeroPlusEngine

#: The folder within a checkpoint that has the engine's files.
_TAG = "checkpoint"
#: Names under which DeepSpeed writes into the dict that has the user's state. Not "lr_scheduler": a schedule of the
#: user's takes the place of DeepSpeed's.
_RESERVED = frozenset(
    """module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments data_sampler
    random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config ds_version""".split()
)


class DeepSpeedFiles(DDPStrategy):
    """Mixin for a strategy of Fabric: ``fabric.save``, ``fabric.load`` and ``fabric.load_raw`` of an engine.

    Every rank writes what it keeps, and reads it again: a checkpoint is for its stage and its number of ranks.
    """

    @override
    def save_checkpoint(
        self, path: _PATH, state: dict[str, Any], storage_options: Any | None = None, filter: Any | None = None
    ) -> None:
        """Save a model, its optimizers, and what else is in ``state``.

        Args:
            path: The folder.
            state: By the user's names. Of what has a ``state_dict()``, that is saved.
            storage_options: Refused.
            filter: Refused.

        Raises:
            TypeError: For ``storage_options`` and ``filter``.
            ValueError: If there is not one model, or DeepSpeed has one of the names; nothing has been written.
        """
        for name, value in (("storage_options", storage_options), ("filter", filter)):
            if value is not None:
                raise TypeError(
                    f"`fabric.save({name}=...)` with `{type(self).__name__}`: DeepSpeed writes the files, and has no"
                    " use for it. Leave it out."
                )
        engine = self._only_engine("save", state)
        rest = {name: value for name, value in state.items() if not _belongs(value, engine)}
        taken = sorted(_RESERVED & rest.keys())
        if taken:
            raise ValueError(f"`fabric.save`: DeepSpeed's files have a {taken[0]!r} of their own. Choose another name.")
        rest = self._convert_stateful_objects_in_state(rest, filter={})
        # All ranks write into one folder, also where each has made up a name.
        engine.save_checkpoint(self.broadcast(path), client_state=rest, tag=_TAG)

    @override
    def load_checkpoint(
        self, path: _PATH, state: Any | None = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load what :meth:`save_checkpoint` has written; or a file with the state dict of one object.

        Args:
            path: The folder; the file for :meth:`lightning.fabric.Fabric.load_raw`.
            state: The model, its optimizers if their states are to be loaded, and what else is to be replaced; or one
                module or optimizer, with a file.
            strict: The checkpoint must have all parameters and buffers of the model, and no others.
            weights_only: True is refused with a folder, which DeepSpeed unpickles without restriction.

        Returns:
            What else is in the checkpoint.

        Raises:
            FileNotFoundError: If there is no checkpoint of DeepSpeed's at ``path``.
            TypeError: For ``weights_only=True`` and a folder.
            ValueError: If there is not one model in ``state``.
        """
        if isinstance(state, (nn.Module, Optimizer)):
            return super().load_checkpoint(self.broadcast(path), state, strict, weights_only)
        engine = self._only_engine("load", state or {})
        assert state is not None
        if weights_only:
            raise TypeError(
                "`fabric.load(weights_only=True)`: DeepSpeed unpickles its files without restriction. Leave it out for"
                " a checkpoint that you trust."
            )
        _check_folder(Path(path))
        with_optimizer = any(_belongs(value, engine) and value is not engine for value in state.values())
        _, loaded = engine.load_checkpoint(
            str(path),
            tag=_TAG,
            load_optimizer_states=with_optimizer,
            load_lr_scheduler_states=False,
            load_module_strict=strict,
        )
        if loaded is None:
            raise FileNotFoundError(f"The checkpoint {str(path)!r} has no file of this rank.")
        users = {name for name, value in state.items() if name not in _RESERVED and not _belongs(value, engine)}
        _move_state_into(loaded, state, {name for name in users if name != "lr_scheduler" or loaded.get(name)})
        return loaded

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load whole tensors into the module of an engine, too."""
        from lightning_zeroplus.engine.engine import ZeroPlusEngine

        super().load_module_state_dict(
            module.module if isinstance(module, ZeroPlusEngine) else module, state_dict, strict
        )

    def _only_engine(self, verb: str, state: Mapping[str, Any]) -> ZeroPlusEngine:
        from lightning_zeroplus.engine.engine import ZeroPlusEngine

        modules = [module for value in state.values() if isinstance(value, nn.Module) for module in value.modules()]
        engines = [module for module in modules if isinstance(module, ZeroPlusEngine)]
        if len(engines) != 1:
            raise ValueError(
                f"`fabric.{verb}(path, state)` with `{type(self).__name__}` takes one model that was set up, with its"
                f" optimizers: `fabric.{verb}(path, {{'model': model, 'optimizer': optimizer}})`. There are"
                f" {len(engines)}. Several models need a path each."
            )
        return engines[0]


def _belongs(value: Any, engine: ZeroPlusEngine) -> bool:
    """Whether this is the engine, or an optimizer of its, whose states are in its files."""
    accumulation = engine.gradient_accumulation
    return value is engine or (
        accumulation is not None and getattr(value, "gradient_accumulation", None) is accumulation
    )


def _check_folder(path: Path) -> None:
    if (path / _TAG).is_dir():
        return
    above = next((parent for parent in (*path.parents,)[:2] if (parent / _TAG).is_dir()), None)
    hint = "" if above is None else f" Did you mean {str(above)!r}?"
    raise FileNotFoundError(f"{str(path)!r} is no folder that `fabric.save` has written with this strategy.{hint}")
