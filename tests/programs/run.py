"""What a program is given: a Trainer with the strategy of its cell, data, and a way to say what is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import lightning as L
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import MixedPrecision as MixedPrecisionOfFabric
from lightning.fabric.strategies import DDPStrategy as DDPStrategyOfFabric
from lightning.fabric.strategies import SingleDeviceStrategy as SingleDeviceOfFabric
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import lightning_zeroplus as zp
from tests.matrix.cells import pretend_fp16_kernels
from tests.programs.state import whole_state
from tests.support.training import accelerator, device, everywhere

Batch = tuple[Tensor, Tensor]
_QUIET = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Run:
    """A program's own Trainer, data and results.

    Attributes:
        rank: This rank.
        world_size: The number of ranks; 1 in a single process.
        folder: An empty folder that all ranks share.
    """

    def __init__(self, strategy: str, precision: str, folder: Path) -> None:
        self.strategy, self.precision, self.folder = strategy, precision, folder
        self.alone = strategy == "single"
        self.rank, self.world_size = (0, 1) if self.alone else (dist.get_rank(), dist.get_world_size())
        self.trainers: list[pl.Trainer] = []
        self.modules: list[torch.nn.Module] = []
        self.kept: dict[str, Tensor] = {}
        self.watch = Watch(snapshots=True)
        self._has_fabric = False

    @property
    def device(self) -> torch.device:
        """The device of this rank's collectives."""
        return device()

    def make_strategy(self, config: Mapping[str, Any] = MappingProxyType({}), **settings: Any) -> Any:
        """A new strategy object of this cell, with further settings of DeepSpeed, and of our strategies.

        The reference has neither.
        """
        return make_strategy(self.strategy, self.precision, config, **settings)

    def trainer(self, **kwargs: Any) -> pl.Trainer:
        """A quiet Trainer with a new strategy object, for one epoch if nothing else is said."""
        defaults: dict[str, Any] = {
            "strategy": self.make_strategy(),
            **everywhere(self.alone),
            "max_epochs": 1,
            "precision": self.precision,
            "logger": AllMetrics(),
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
            "default_root_dir": self.folder,
            **_QUIET,
        }
        if not self.strategy.startswith("stage") and self.precision == "16-mixed":
            # Lightning has its own opinion of "16-mixed", on CPU and for strategies that subclass its FSDP2 strategy.
            defaults |= {"precision": None, "plugins": [MixedPrecision("16-mixed", accelerator())]}
        callbacks = [_AfterBroadcast(), self.watch, *kwargs.pop("callbacks", ())]
        made = pl.Trainer(callbacks=callbacks, **(defaults | kwargs))
        self.trainers.append(made)
        return made

    def fit(
        self, module: pl.LightningModule, loader: Any = None, val: Any = None, ckpt_path: Any = None, **kwargs: Any
    ) -> pl.Trainer:
        """Fit ``module`` with a new Trainer, on four batches if nothing else is said."""
        made = self.trainer(**kwargs)
        self.compare(module)
        made.fit(module, loader if loader is not None else self.loader(), val, ckpt_path=ckpt_path)
        return made

    def make_fabric(self) -> L.Fabric:
        """A Fabric with a new strategy object."""
        self._has_fabric = True
        chosen: dict[str, Any] = {"precision": self.precision}
        if self.precision == "16-mixed":
            chosen = {"plugins": [MixedPrecisionOfFabric("16-mixed", accelerator())]}
        strategy = make_fabric_strategy(self.strategy, self.precision)
        return _Fabric(strategy=strategy, **everywhere(self.alone), **chosen)

    def fabric(self) -> L.Fabric:
        """:meth:`make_fabric`, launched."""
        made = self.make_fabric()
        made.launch()
        return made

    def compare(self, module: torch.nn.Module) -> None:
        """Compare the parameters and buffers that ``module`` has in the end; ``fit`` does it by itself."""
        if not any(module is each for each in self.modules):
            self.modules.append(module)
        if self._has_fabric and self.watch.snapshots and self.watch.start is None:
            self.watch.start = whole_state(module)  # no Trainer tells where the loop begins

    def keep(self, **results: Tensor | float) -> None:
        """Compare these, too."""
        for name, value in results.items():
            self.kept[name] = torch.as_tensor(value).detach().cpu().clone()

    def loader(
        self,
        batches: int = 4,
        rows: int = 4,
        make: Callable[[torch.Generator, int], Any] | None = None,
        moved: bool = True,
    ) -> Any:
        """A loader of this rank's batches, which no other rank has; in a single process each is that of all ranks.

        Args:
            batches: Their number.
            rows: Samples per batch and rank.
            make: Makes a batch of so many rows, a tuple of tensors. None: inputs ``(rows, 8)``, targets ``(rows, 4)``.
            moved: After :meth:`fabric`, give batches on its device, as ``fabric.setup_dataloaders`` does.
        """
        generator = torch.Generator().manual_seed(1)
        world_size = dist.get_world_size()
        drawn = [[(make or pairs)(generator, rows) for _ in range(world_size)] for _ in range(batches)]
        if self.alone:
            mine = [tuple(torch.cat(parts) for parts in zip(*ranks, strict=True)) for ranks in drawn]
        else:
            mine = [ranks[self.rank] for ranks in drawn]
        if moved and self._has_fabric and not self.alone:
            mine = [tuple(tensor.to(self.device) for tensor in batch) for batch in mine]
        return DataLoader(mine, batch_size=None)

    def state(self, module: torch.nn.Module) -> dict[str, Tensor]:
        """Whole copies of parameters and buffers, whatever the strategy has made of them. All ranks call it."""
        return whole_state(module)


def still_cut(run: Run) -> list[str]:
    """Parameters that a Trainer has left sharded or partitioned.

    After an exception it leaves them so, because gathering needs all ranks; and a Fabric always does.
    """
    ended = run.trainers and all(trainer.state.finished for trainer in run.trainers)
    modules = run.modules if ended and not run._has_fabric else []
    return [
        name
        for module in modules
        for name, param in module.named_parameters()
        if isinstance(param, DTensor) or hasattr(param, "ds_id")
    ]


def pairs(generator: torch.Generator, rows: int) -> Batch:
    """Inputs ``(rows, 8)`` and targets ``(rows, 4)``."""
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


def tokens(generator: torch.Generator, rows: int) -> tuple[Tensor]:
    """Ids ``(rows, 6)`` below 16."""
    return (torch.randint(0, 16, (rows, 6), generator=generator),)


def images(generator: torch.Generator, rows: int) -> Batch:
    """Images ``(rows, 3, 8, 8)`` and classes ``(rows,)`` below 4."""
    return torch.randn(rows, 3, 8, 8, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


#: What follows the stage in a strategy's name, and what it means.
_VARIANTS: dict[str, dict[str, Any]] = {
    "step": {"reduction": "step"},
    "offload": {"offload": "cpu"},
    "compile": {"compile": {"backend": "eager"}},
    "large": {},  # DeepSpeed's own sizes: one bucket for all, and nothing of these models is partitioned at stage 3
    "mixed": {},  # as larger models under DeepSpeed's own sizes: matrices are partitioned, and biases stay
    # Each module that has parameters of its own is gathered by itself, in the forward and in the backward.
    "wrap": {"wrap": 1, "reshard_after_forward": True},
    "replicas": {"replicate_size": 2},  # HSDP, on four ranks
}


def make_strategy(
    name: str, precision: str = "32-true", config: Mapping[str, Any] = MappingProxyType({}), **settings: Any
) -> Any:
    """The strategy of a column; buckets are small, and everything is partitioned at stage 3, if not ``large``."""
    if name == "single":
        return SingleDeviceStrategy(device())
    if name.startswith("ddp"):
        return name
    kwargs = _arguments(name, precision) | settings
    if config:
        kwargs["config"] |= config
    return (zp.ZeroPlusFSDPStrategy if name.startswith("fsdp") else zp.ZeroPlusStrategy)(**kwargs)


def make_fabric_strategy(name: str, precision: str = "32-true") -> Any:
    """As :func:`make_strategy`, for Fabric."""
    if name == "single":
        return SingleDeviceOfFabric(device())
    return name if name.startswith("ddp") else zp.ZeroPlusFabricStrategy(**_arguments(name, precision))


def _arguments(name: str, precision: str) -> dict[str, Any]:
    base, *variants = name.split("_")
    # "auto" would be "step" for models as small as these; what DeepSpeed has by default is what it is.
    is_auto = base in ("stage0", "stage1") or {"large", "mixed"} & {*variants}
    kwargs: dict[str, Any] = {"reduction": "auto" if is_auto else "backward"}
    for variant in variants:
        kwargs |= _VARIANTS[variant]
    if base == "fsdp":
        return kwargs
    zero = {} if "large" in variants else {"reduce_bucket_size": 100, "stage3_param_persistence_threshold": 0}
    if "mixed" in variants:
        zero = {"stage3_param_persistence_threshold": 20}
    config: dict[str, Any] = {"zero_optimization": zero}
    if precision == "16-true":
        config["fp16"] = {"loss_scale": 128}
    return {"stage": int(base.removeprefix("stage")), "config": config, **kwargs}


class Watch(pl.Callback):
    """Notes where training starts, and the weights after each batch, which a refusal must not have changed wrongly.

    Gathering weights in the middle of a fit might hide what is wrong with them, so it is done only where it is needed.
    """

    def __init__(self, snapshots: bool) -> None:
        self.snapshots = snapshots
        self.start: dict[str, Tensor] | None = None
        self.after_batch: list[dict[str, Tensor]] = []
        self.metrics: list[dict[str, float]] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.snapshots and self.start is None:
            self.start = whole_state(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self.snapshots:
            self.after_batch.append(whole_state(pl_module))


class _AfterBroadcast(pl.Callback):
    """Lets DDP's broadcast of weights end before `on_fit_start` of the module.

    Lightning wraps the module on a stream that nothing waits for. With a slow wire, weights that are loaded in
    `on_fit_start` were overwritten by it on a real GPU, on one rank. Our strategies must do without.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if accelerator() == "cuda" and type(trainer.strategy) is DDPStrategy:
            torch.cuda.synchronize()


class _Fabric(L.Fabric):
    """The same for Fabric, whose first read of a buffer came before the broadcast."""

    def setup(self, *args: Any, **kwargs: Any) -> Any:
        return self._after_broadcast(super().setup(*args, **kwargs))

    def setup_module(self, *args: Any, **kwargs: Any) -> Any:
        return self._after_broadcast(super().setup_module(*args, **kwargs))

    def _after_broadcast(self, made: Any) -> Any:
        if accelerator() == "cuda" and type(self.strategy) is DDPStrategyOfFabric:
            torch.cuda.synchronize()
        return made


class AllMetrics(Logger):
    """Keeps everything that is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "all"

    @property
    def version(self) -> int:
        return 0

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, dict(metrics)))


@contextmanager
def without_other_ranks() -> Iterator[None]:
    """A single process within a rank: nothing that asks for a process group finds one."""
    with patch.object(dist, "is_initialized", return_value=False):
        yield


def prepare(precision: str) -> None:
    """What a cell needs before its program begins."""
    torch.manual_seed(0)
    if precision.startswith("16"):
        pretend_fp16_kernels()
