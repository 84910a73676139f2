"""The strategy names that ``import lightning_zeroplus`` registers with Lightning."""

from __future__ import annotations

from typing import Any, get_type_hints

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zeroplus.strategy.deepspeed.fabric import ZeroPlusFabricStrategy
from lightning_zeroplus.strategy.deepspeed.trainer import ZeroPlusStrategy
from lightning_zeroplus.strategy.fsdp2.trainer import ZeroPlusFSDPStrategy


def register_strategies() -> None:
    """Register every ``zeroplus_*`` name with the Trainer and with Fabric. A second call changes nothing."""
    both: dict[str, dict[str, Any]] = {f"zeroplus_stage{stage}": {"stage": stage} for stage in range(4)}
    both |= {f"zeroplus_stage{stage}_offload": {"stage": stage, "offload": "cpu"} for stage in (2, 3)}
    compiled = {f"zeroplus_stage{stage}_compile": {"stage": stage, "compile": True} for stage in (1, 2, 3)}
    for registry, strategy, names in (
        (StrategyRegistry, ZeroPlusStrategy, both | compiled),
        (STRATEGY_REGISTRY, ZeroPlusFabricStrategy, both),
    ):
        for name, arguments in names.items():
            description = ", ".join(f"{key} {value}" for key, value in arguments.items())
            registry.register(name, strategy, description=description, override=True, **arguments)
    StrategyRegistry.register("zeroplus_fsdp", ZeroPlusFSDPStrategy, description="FSDP2", override=True)
    # To evaluate annotations that are strings, jsonargparse (LightningCLI) executes the module's `if TYPE_CHECKING:`
    # imports. They import DeepSpeed, which would fix its accelerator before the Trainer picks one.
    ZeroPlusStrategy.__init__.__annotations__.update(get_type_hints(ZeroPlusStrategy.__init__))
