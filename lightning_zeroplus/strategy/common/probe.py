"""Check that Lightning has the methods that the strategies override, some of which are not public.

If a release renamed one, ours would never be called, and the Trainer would silently train with Lightning's own
DeepSpeed engine.
"""

from __future__ import annotations

import functools

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch.plugins.precision.deepspeed import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_zeroplus.internals.probe import Probe

_STAGES = (0, 1, 2, 3)


def _of(cls: type, feature: str, methods: str, *calls: tuple[str, str]) -> Probe:
    return Probe(feature, _STAGES, f"{cls.__module__}.{cls.__qualname__}", methods=methods, calls=calls)


TRAINER = (
    _of(
        DeepSpeedStrategy,
        "the engine of a Trainer",
        """setup setup_distributed init_deepspeed _init_optimizers _initialize_deepspeed_train model_sharded_context
        _setup_model_and_optimizer _initialize_deepspeed_inference _format_config _init_deepspeed_distributed
        _set_deepspeed_activation_checkpointing _configure_launcher""",
        ("setup", "init_deepspeed"),
        ("_initialize_deepspeed_train", "_init_optimizers"),
        ("_initialize_deepspeed_train", "_setup_model_and_optimizer"),
    ),
    _of(
        DeepSpeedPrecision,
        "backward, clipping and stepping of a Trainer",
        "backward optimizer_step clip_gradients convert_module convert_input tensor_init_context",
    ),
)
FABRIC = (
    _of(
        DDPStrategy,
        "the engine of Fabric",
        """setup_environment _setup_distributed _set_world_ranks _get_process_group_backend setup_module setup_optimizer
        setup_module_and_optimizers module_init_context backward optimizer_step clip_gradients_norm clip_gradients_value
        save_checkpoint load_checkpoint load_module_state_dict _convert_stateful_objects_in_state""",
        ("setup_environment", "_setup_distributed"),
    ),
    _of(
        Fabric,
        "the calls of a loop of the user's own",
        "setup setup_module setup_optimizers backward clip_gradients no_backward_sync init_module save load load_raw",
        ("setup", "setup_module_and_optimizers"),
        ("setup_optimizers", "setup_optimizer"),
        ("backward", "backward"),
        ("no_backward_sync", "_backward_sync_control"),
        ("init_module", "module_init_context"),
        ("save", "save_checkpoint"),
        ("load", "load_checkpoint"),
    ),
)


class UnsupportedLightningError(RuntimeError):
    """The installed Lightning lacks something that the strategies override."""


@functools.cache
def check_lightning(probes: tuple[Probe, ...]) -> None:
    """Refuse a Lightning that would not call the overrides of the strategies.

    Raises:
        UnsupportedLightningError: If a method or a call is missing; naming it, the version, and the feature.
    """
    for probe in probes:
        lost = probe.missing()
        if lost:
            import lightning

            raise UnsupportedLightningError(
                f"Lightning {lightning.__version__} is not supported: it has no {', '.join(lost)}, which"
                f" {probe.feature!r} relies on. Install a release that lightning-zeroplus is tested with: 2.6."
            )
