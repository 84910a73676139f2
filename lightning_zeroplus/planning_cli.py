"""The command ``plan``: which strategy fits, and what it costs on the wire. Needs jsonargparse."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.connector import _convert_precision_to_unified_args
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers, _MockOptimizer
from torch.optim import Optimizer, optimizer
from typing_extensions import override

from lightning_zeroplus.gradients.patches.replacement import Replacement
from lightning_zeroplus.plan.choose import Job, plan
from lightning_zeroplus.plan.estimate import Link
from lightning_zeroplus.plan.model import describe
from lightning_zeroplus.plan.report import Machine, as_json, parse_bytes, parse_rate, parse_time, report
from lightning_zeroplus.plan.settings import settings_of

#: What the Trainer would make besides, and nobody needs to build the module.
_LEFT_OUT = ("callbacks", "logger", "plugins", "profiler")


def run(arguments: Sequence[str]) -> int:
    """Print the table.

    Args:
        arguments: The command line after ``plan``.

    Returns:
        The exit status: 0 if a strategy fits; 1 if none does, or nothing can be planned; 2 for a wrong option.
    """
    parser = _parser()
    options, others = parser.parse_known_args(arguments)
    machine = Machine(
        _option(parser, "--memory", parse_bytes, options.memory),
        _option(parser, "--activations", parse_bytes, options.activations) if options.activations else 0,
        Link(
            _option(parser, "--wire", parse_rate, options.wire),
            _option(parser, "--latency", parse_time, options.latency),
        ),
    )
    for name in ("gpus", "backwards"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: give a positive integer")
    try:
        with _quiet():
            cli = PlanningCLI(options.device, others)
            settings = settings_of(cli.strategy)
            is_manual = not cli.model.automatic_optimization
            model = describe(
                cli.model, cli.optimizers, cli.precision, settings.wrap, is_manual, settings.reshard_after_forward
            )
            accumulated = 1 if cli.accumulated is None else cli.accumulated
            job = Job(options.gpus, options.backwards or accumulated, options.backwards is None and accumulated > 1)
            estimates = plan(model, job, settings)
    except ValueError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(as_json(model, job, machine, estimates))
        return 0 if any(each.peak + machine.activations <= machine.memory for each in estimates) else 1
    return 1 if report(model, job, machine, estimates) is None else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_zeroplus plan",
        description="Which strategy fits, and what it costs on the wire: builds the module of a config on the meta"
        " device, and counts. All other options are those of `fit`, such as --config run.yaml and --trainer.precision"
        " bf16-true. Exit status 1: nothing fits.",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="devices in all")
    parser.add_argument("--memory", required=True, metavar="SIZE", help="of a device, such as 80GiB")
    parser.add_argument("--wire", default="400Gbit", metavar="RATE", help="what a device can send per second (400Gbit)")
    parser.add_argument("--latency", default="20us", metavar="TIME", help="of a collective (20us)")
    parser.add_argument(
        "--backwards", type=int, metavar="N", help="backwards per step (the config's accumulate_grad_batches)"
    )
    parser.add_argument("--activations", metavar="SIZE", help="what activations need, such as 20GiB (not counted)")
    parser.add_argument(
        "--device", default="meta", choices=("meta", "cpu"), help="where to build the module; meta needs no memory"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def _option(parser: argparse.ArgumentParser, name: str, parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        parser.error(f"{name} {error}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Lightning reports of a Trainer, and of seeds; it compares ``sys.argv`` with what it is given."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    argv, sys.argv = sys.argv, sys.argv[:1]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.argv = argv
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class PlanningCLI(LightningCLI):
    """Reads a config as ``fit`` does, and builds the module and its optimizers only.

    Args:
        device: Where to build them.
        arguments: The options of ``fit``.

    Attributes:
        strategy: Of the config: a strategy, or the name of one.
        precision: Of the config.
        accumulated: ``accumulate_grad_batches`` of the config, if that is a number.
        optimizers: Of the module.

    Raises:
        ValueError: If they cannot be built on this device.
    """

    def __init__(self, device: str, arguments: Sequence[str]) -> None:
        self.device = device
        self.strategy: Any = None
        self.precision = "32-true"
        self.accumulated: int | None = None
        self.optimizers: list[Optimizer] = []
        super().__init__(save_config_callback=None, args=["fit", *arguments])

    @override
    def instantiate_classes(self) -> None:
        config = self.config.clone()
        for name in _LEFT_OUT:
            config.fit.trainer[name] = None
        if "data" in config.fit:
            config.fit.data = None
        with self._building("The module", "`__init__`"), torch.device(self.device):
            self.config_init = self.parser.instantiate_classes(config)
            self.model = self._get(self.config_init, "model")
        self._add_configure_optimizers_method_to_model("fit")
        trainer = self._get(self.config_init, "trainer")
        self.strategy = trainer.strategy
        self.precision = str(_convert_precision_to_unified_args(trainer.precision) or "32-true")
        self.accumulated = trainer.accumulate_grad_batches
        self._prepare(self.model, trainer.max_steps)

    def _prepare(self, model: LightningModule, max_steps: int | None) -> None:
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        # Schedulers ask for the number of steps; it does not matter here.
        model.trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=-1,
            max_steps=max_steps if max_steps is not None and max_steps > 0 else 1000,
            **dict.fromkeys(quiet, False),  # type: ignore[arg-type]
        )
        with self._building("The module", "`configure_model`"), torch.device(self.device):
            model.configure_model()
        with self._building("The optimizer", "`configure_optimizers`"), _fused_on_meta():
            made, _ = _init_optimizers_and_lr_schedulers(model)
        self.optimizers = [each for each in made if not isinstance(each, _MockOptimizer)]

    @contextmanager
    def _building(self, what: str, where: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            remedy = "" if self.device == "cpu" else " Build it with `--device cpu`, which needs the memory."
            if what == "The optimizer":
                remedy += " Or name one: `--optimizer torch.optim.AdamW --optimizer.lr 1e-3`."
            raise ValueError(
                f"{what} cannot be built on the {self.device} device, in {where}: {type(error).__name__}:"
                f" {error}.{remedy}"
            ) from error

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing is run."""


@contextmanager
def _fused_on_meta() -> Iterator[None]:
    """Let optimizers with ``fused=True`` accept parameters on the meta device."""
    supported = optimizer._get_fused_kernels_supported_devices
    with Replacement(optimizer, "_get_fused_kernels_supported_devices", lambda: [*supported(), "meta"])():
        yield
