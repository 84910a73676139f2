"""The user's module around a fit: what is refused before anything is changed, and what DDP would do to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_zeroplus.engine.optimizer.elementwise import class_of_states, has_common_states
from lightning_zeroplus.gradients.ranks.from_rank_0 import begin_alike
from lightning_zeroplus.weights.overlaps import overlaps

if TYPE_CHECKING:
    import lightning.pytorch as pl


def begin_fit(strategy: Any, trainer: pl.Trainer) -> None:
    """Do what Lightning's DDP does to a module before it wraps it; a collective.

    Layers are synchronized (``Trainer(sync_batchnorm=True)``), and every rank gets the weights and buffers of rank 0.

    Args:
        strategy: A ``ParallelStrategy``, before it has configured optimizers.
        trainer: Its Trainer.

    Raises:
        MisconfigurationException: If the module asks DDP to leave some of its parameters or buffers to each rank.
        ValueError: If the ranks have different modules.
    """
    if trainer.state.fn == TrainerFn.FITTING:
        ignored = getattr(strategy.lightning_module, "_ddp_params_and_buffers_to_ignore", None)
        if ignored:
            raise MisconfigurationException(
                f"The module's `_ddp_params_and_buffers_to_ignore` names {min(ignored)!r}, which DDP leaves to each"
                " rank. This strategy has one value for all ranks. Remove the attribute, or use `strategy='ddp'`."
            )
        if strategy._layer_sync is not None:
            strategy.model = strategy._layer_sync.apply(strategy.model)
        begin_alike(strategy.lightning_module, strategy.root_device)


def log_graphs(trainer: pl.Trainer) -> None:
    """Let loggers trace the module before it is sharded, as ``TensorBoardLogger(log_graph=True)`` does on rank 0.

    The Trainer asks them when the fit has begun; then one rank alone cannot trace.
    """
    module, own = trainer.lightning_module, list(trainer.lightning_module.parameters())
    is_whole = not any(hasattr(param, "ds_id") or isinstance(param, DTensor) or param.is_meta for param in own)
    if module.example_input_array is None or not own or not is_whole:
        return
    device, module._device = module.device, own[0].device  # the Trainer has noted where it goes
    try:
        for logger in trainer.loggers:
            if isinstance(logged := vars(logger).get("log_graph"), _HasLogged):
                logged()  # of a fit that failed before the Trainer asked
            logger.log_graph(module)
            vars(logger)["log_graph"] = _HasLogged(logger)
    finally:
        module._device = device


def metrics_to(module: nn.Module, device: torch.device) -> None:
    """Move the states of metrics that a checkpoint has given: under DDP the module goes to the device after that."""
    for metric in module.modules() if device.type != "cpu" else ():
        if isinstance(metric, Metric):
            metric.to(device)


class _HasLogged:
    """Takes the place of ``logger.log_graph`` for one call."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        vars(self._logger).pop("log_graph", None)


def check_modules(model: nn.Module, strategy: str) -> None:
    """Refuse modules with sparse gradients, because partitions are dense.

    Raises:
        MisconfigurationException: If there is one, naming it.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise MisconfigurationException(
                f"`{type(module).__name__}(sparse=True)`, the module {name!r}, has sparse gradients, and"
                f" `{strategy}` partitions dense ones. Use `sparse=False`, or `strategy='zeroplus_stage0'`."
            )


def check_elements(model: nn.Module, strategy: str) -> None:
    """Refuse parameters without elements, which neither FSDP2 nor ZeRO stage 3 can gather.

    Raises:
        MisconfigurationException: If there is one, naming it.
    """
    for name, param in model.named_parameters():
        if not getattr(param, "ds_numel", param.numel()):
            raise MisconfigurationException(
                f"The parameter {name!r} has no elements, and `{strategy}` cannot gather it. Make it a buffer, or use"
                " `strategy='zeroplus_stage2'`."
            )


def check_memory(model: nn.Module, strategy: str, device: torch.device) -> None:
    """Refuse parameters with common memory, of which one is trained: an update of one would change the other.

    Args:
        model: The module.
        strategy: For the message.
        device: Where it is trained. On the way to another device every parameter gets memory of its own.

    Raises:
        MisconfigurationException: If there are two, naming them.
    """
    own = model.named_parameters()
    whole = [(name, param) for name, param in own if param.device == device and not hasattr(param, "ds_id")]
    trained = {name for name, param in whole if param.requires_grad}
    memory = ((name, param.data) for name, param in whole)
    pairs = overlaps((name, data) for name, data in memory if not hasattr(data, "__tensor_flatten__"))
    found = next((pair for pair in pairs if trained.intersection(pair)), None)
    if found is not None:
        raise MisconfigurationException(
            f"The parameters {found[0]!r} and {found[1]!r} have the same memory, as after `first.data = second.data`."
            f" Under DDP an update of one changes the other, too; `{strategy}` keeps them apart. Share the parameter,"
            " `first_module.weight = second_module.weight`, give one a copy, `first.data = second.data.clone()`, or use"
            " `strategy='zeroplus_stage0'`."
        )


def check_states(optimizer: Optimizer, strategy: str, cuts: bool = True) -> None:
    """Refuse an optimizer whose states are of a tensor class of its own, or of no parameter.

    Args:
        optimizer: The optimizer.
        strategy: For the message.
        cuts: Whether the strategy cuts states, and saves them by parameter.

    Raises:
        MisconfigurationException: Naming the optimizer.
    """
    if cuts and has_common_states(optimizer):
        raise MisconfigurationException(
            f"`{type(optimizer).__name__}` keeps states that belong to no parameter, which `{strategy}` can neither cut"
            " nor save by parameter. Use another optimizer, or `strategy='ddp'`."
        )
    found = class_of_states(optimizer)
    if found is not None:
        raise MisconfigurationException(
            f"`{type(optimizer).__name__}` keeps states as `{found.__name__}`, a class of tensors that `{strategy}` can"
            " neither cut nor save by parameter. Use an optimizer with ordinary tensors, such as `torch.optim.AdamW`,"
            " or `strategy='ddp'`."
        )


def check_groups(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Refuse a parameter that a group has twice, such as a tied one: DDP steps it twice, of which torch warns.

    Raises:
        MisconfigurationException: If there is one, naming it.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            seen: set[int] = set()
            for param in group["params"]:
                if id(param) in seen:
                    raise MisconfigurationException(
                        f"`configure_optimizers` returned a `{type(optimizer).__name__}` that has the parameter"
                        f" {names.get(id(param))!r} twice in a group, and would step it twice. Give each parameter"
                        " once: `list(dict.fromkeys(params))`."
                    )
                seen.add(id(param))
