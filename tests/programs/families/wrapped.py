"""Layers whose names in the ``state_dict`` are not those of their parameters: torch's activation checkpointing."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import lightning_zeroplus as zp
from tests.programs.base import Regression
from tests.programs.fabric_base import fabric_program, loss_of, train_on
from tests.programs.families.averages import average_of, make_ema
from tests.programs.families.frozen import FrozenForAnEpoch, Trunk, saved
from tests.programs.program import program
from tests.programs.run import Run


def _wrapped() -> nn.Sequential:
    return nn.Sequential(checkpoint_wrapper(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 4))


class _Wrapped(Regression):
    """Its optimizer has states, and it wraps one layer."""

    def build(self) -> nn.Module:
        return _wrapped()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.02)


class _Bare(_Wrapped):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


@program(on_three_ranks=True)
def activation_wrapper_resumed(run: Run) -> None:
    """A layer in `checkpoint_wrapper`, which takes its own name out of the `state_dict`; the fit goes on."""
    run.fit(_Wrapped(), ckpt_path=saved(run, _Wrapped()), max_epochs=2)


@program()
def activation_wrapper_taken_off(run: Run) -> None:
    """A fit goes on without the wrapper, whose checkpoint has the names of the bare layer."""
    run.fit(_Bare(), ckpt_path=saved(run, _Wrapped()), max_epochs=2)


@program()
def activation_wrapper_put_on(run: Run) -> None:
    """A fit goes on with a wrapper that it did not have before."""
    run.fit(_Wrapped(), ckpt_path=saved(run, _Bare()), max_epochs=2)


@program()
def activation_wrapper_from_one_file(run: Run) -> None:
    """The file of `zp.export` has the names of DDP's checkpoint, and a fit goes on from it."""
    path = run.folder / "file.ckpt"
    zp.export(saved(run, _Wrapped()), path, optimizer=True)
    run.trainers[-1].strategy.barrier()
    run.keep(**torch.load(path, weights_only=True)["state_dict"])
    run.fit(_Wrapped(), ckpt_path=path, max_epochs=2)


@program()
def activation_wrapper_applied(run: Run) -> None:
    """`apply_activation_checkpointing` in `configure_model`, as FSDP's examples have it."""

    class Applied(_Bare):
        def configure_model(self) -> None:
            if not hasattr(self.net[0], "_checkpoint_wrapped_module"):
                apply_activation_checkpointing(self.net, check_fn=lambda module: isinstance(module, nn.Linear))

    run.fit(Applied(), ckpt_path=saved(run, Applied()), max_epochs=2)


def _averaged(run: Run, cls: type[_Wrapped]) -> None:
    average = make_ema(run, 0.8)
    options: dict[str, Any] = {"val": run.loader(2)}
    path = saved(run, cls(), callbacks=[average], **options)
    resumed = make_ema(run, 0.8) if isinstance(average, zp.EMA) else average
    trainer = run.fit(cls(), ckpt_path=path, max_epochs=2, callbacks=[resumed], **options)
    averages = average_of(run, trainer, resumed)
    run.keep(**{re.sub(r"_orig_mod\.|_checkpoint_wrapped_module\.", "", name): averages[name] for name in averages})


@program(bound=1e-7)
def activation_wrapper_averaged(run: Run) -> None:
    """`zp.EMA` of wrapped layers, which validates with the average, goes on in a resumed fit, and is exported."""
    _averaged(run, _Wrapped)


@program(bound=1e-7)
def compiled_network_averaged(run: Run) -> None:
    """The same of a network that `torch.compile` has wrapped."""

    class Compiled(_Bare):
        def build(self) -> Any:
            return torch.compile(super().build(), backend="eager")

    _averaged(run, Compiled)


@program(reference="single")
def activation_wrapper_frozen_for_an_epoch(run: Run) -> None:
    """Wrapped layers that are frozen for the first epoch of the resumed fit keep their states."""

    def wrapped(cls: type[Any]) -> Any:
        return type(cls.__name__, (cls,), {"build": lambda self: _wrapped()})

    run.fit(wrapped(FrozenForAnEpoch)(), ckpt_path=saved(run, wrapped(Trunk)(False)), max_epochs=3)


@program()
def activation_wrapper_decided_by_a_hook(run: Run) -> None:
    """`on_save_checkpoint` leaves out a wrapped weight, and `on_load_checkpoint` puts another in its place."""

    class Hooked(_Wrapped):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            del checkpoint["state_dict"]["net.0.bias"]

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["net.0.bias"] = torch.full((16,), 0.1)

    run.fit(Hooked(), ckpt_path=saved(run, Hooked()), max_epochs=2)


@fabric_program()
def fabric_activation_wrapper(run: Run) -> None:
    """Under Fabric: saved, and loaded into another model and optimizer."""
    fabric = run.fabric()
    for fit in range(2):
        net = _wrapped()
        run.compare(net)
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.02))
        state = {"model": model, "optimizer": optimizer}
        if fit:
            fabric.load(str(run.folder / "last"), state)
        for batch in run.loader():
            train_on(fabric, model, optimizer, batch)
        fabric.save(str(run.folder / "last"), state)
    run.keep(loss=loss_of(model, next(iter(run.loader()))).detach())


class _Renames(_Bare):
    """Its checkpoints have the names of an earlier version, by hooks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_rename)
        self.register_load_state_dict_pre_hook(_rename_back)


def _rename(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    state[f"{prefix}earlier"] = state.pop(f"{prefix}net.0.weight")


def _rename_back(module: nn.Module, state: Any, prefix: str, *unused: Any) -> None:
    state[f"{prefix}net.0.weight"] = state.pop(f"{prefix}earlier")


@program()
def saved_by_earlier_names(run: Run) -> None:
    """Hooks of `state_dict` and `load_state_dict` rename a weight; the fit goes on, with its optimizer's state."""
    run.fit(_Renames(), ckpt_path=saved(run, _Renames()), max_epochs=2)


@program()
def saved_by_earlier_names_and_changed(run: Run) -> None:
    """The same, and `on_load_checkpoint` puts another weight in its place; its optimizer's state stays."""

    class Changed(_Renames):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["earlier"] = torch.full((16, 8), 0.1)

    run.fit(Changed(), ckpt_path=saved(run, Changed()), max_epochs=2)
