"""Settings of our strategies for checkpoints: without frozen weights, and written in the background."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from torch import Tensor, nn

from tests.programs.base import Regression
from tests.programs.program import program
from tests.programs.run import Run


class _WithAdam(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.02)


class _Tunes(Regression):
    """A frozen trunk with a tie and buffers, whose memory no rank's share fits, and a head."""

    def build(self) -> nn.Module:
        trunk = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
        trunk[3].weight = trunk[0].weight
        return nn.ModuleDict({"trunk": trunk.requires_grad_(False), "head": nn.Linear(8, 4)})

    def forward(self, x: Tensor) -> Tensor:
        return self.net["head"](self.net["trunk"](x))  # type: ignore[index]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], 0.02)


class _Schedules(_Tunes):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step"}]


def _small(run: Run) -> dict[str, Any]:
    return {"strategy": run.make_strategy(save_frozen=False)}


def _in_parts(run: Run, make: type[_Tunes], ends: tuple[int, ...], **trainer: Any) -> None:
    """A fit that is stopped after some steps, saved, and resumed by a new module in a new Trainer."""
    path = None
    for end in ends:
        made = run.fit(make(), ckpt_path=path, max_epochs=-1, max_steps=end, **_small(run), **trainer)
        path = run.folder / f"{end}.ckpt"
        made.save_checkpoint(path)


@program(on_three_ranks=True)
def resumed_with_running_averages(run: Run) -> None:
    """Several BatchNorms, whose buffers differ from rank to rank when they are saved: those of rank 0 go on."""

    class Normalizes(_WithAdam):
        def build(self) -> nn.Module:
            layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh())]
            return nn.Sequential(*layers, nn.Linear(8, 4))

    path = None
    for end in (1, 3, 6):
        made = run.fit(Normalizes(), ckpt_path=path, max_epochs=-1, max_steps=end)
        path = run.folder / f"{end}.ckpt"
        made.save_checkpoint(path)


def _rounds(run: Run, make: Callable[[int], pl.LightningModule], **trainer: Any) -> None:
    """An epoch, and three more fits of an epoch, each by a new module from the checkpoint of the last."""
    path = None
    for epoch in range(4):
        how = {name: value() for name, value in trainer.items()} | _small(run)
        made = run.fit(make(epoch), ckpt_path=path, max_epochs=epoch + 1, **how)
        path = run.folder / f"{epoch}.ckpt"
        made.save_checkpoint(path)


@program(on_three_ranks=True)
def saved_without_frozen(run: Run) -> None:
    """`save_frozen=False`: a fine-tuning whose trunk is frozen, stopped in mid-epoch, goes on in a new Trainer."""
    _in_parts(run, _Schedules, (2, 7))


@program(precision="16-true", without=("fsdp*",))  # Adam in fp16 without masters: its epsilon is zero
def saved_without_frozen_in_fp16(run: Run) -> None:
    """`save_frozen=False` in fp16, where only what is trained has masters of 32 bits."""
    _in_parts(run, _Tunes, (2, 5))


@program(reference="single")
def saved_while_it_is_unfrozen(run: Run) -> None:
    """`save_frozen=False`, and BackboneFinetuning: saved while the trunk is frozen, and when it was trained."""

    class Backbone(Regression):
        def build(self) -> nn.Module:
            self.backbone = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
            return nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(torch.tanh(self.backbone(x)))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], 0.02)

    _rounds(run, lambda epoch: Backbone(), callbacks=lambda: [BackboneFinetuning(2, verbose=False)])


@program()
def saved_after_it_was_frozen(run: Run) -> None:
    """`save_frozen=False`: layers that one fit trains and the next ones freeze are saved, also by those."""

    class Freezes(Regression):
        """The first layers are frozen."""

        def __init__(self, count: int) -> None:
            super().__init__()
            for number in range(min(count, 2)):
                self.net[number].requires_grad_(False)  # type: ignore[index]

        def build(self) -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.02)

    _rounds(run, Freezes)


def _behind(run: Run, **more: Any) -> dict[str, Any]:
    return {"strategy": run.make_strategy(save_async=True, **more), "enable_checkpointing": True}


@program(on_three_ranks=True)
def saved_in_the_background(run: Run) -> None:
    """`save_async=True`: ModelCheckpoint saves every step; new Trainers resume from a middle one and from the last."""
    saves = ModelCheckpoint(run.folder, "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)
    run.fit(_WithAdam(), callbacks=[saves], max_epochs=2, max_steps=6, **_behind(run))
    middle = Path(saves.best_model_path).with_name("step=3.ckpt")
    run.fit(_WithAdam(), ckpt_path=middle, max_epochs=2, **_behind(run))
    run.fit(_WithAdam(), ckpt_path=saves.last_model_path, max_epochs=3, **_behind(run))


@program()
def loaded_at_once_after_the_background(run: Run) -> None:
    """`save_async=True`: the last checkpoint is loaded as soon as the fit ends: tested, and trained on."""
    saves = ModelCheckpoint(run.folder, monitor="val_loss", every_n_train_steps=2, save_top_k=1, save_last=True)
    module = _WithAdam()
    how: dict[str, Any] = {"val_check_interval": 2, "max_epochs": 2, **_behind(run)}
    trainer = run.fit(module, val=run.loader(2), callbacks=[saves], **how)
    for path in ("best", saves.last_model_path):
        found = trainer.validate(module, run.loader(3), ckpt_path=path, verbose=False)
        run.keep(**{f"loaded {path == 'best'}": found[0]["val_loss"]})
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, run.loader(), run.loader(2), ckpt_path=saves.last_model_path)


@program()
def saved_small_in_the_background(run: Run) -> None:
    """`save_async=True` and `save_frozen=False`: the best two are kept, and a fit goes on from the best."""
    saves = ModelCheckpoint(run.folder, "{step}", monitor="loss", every_n_train_steps=1, save_top_k=2)
    how = _behind(run, save_frozen=False)
    trainer = run.fit(_Schedules(), callbacks=[saves], max_epochs=2, **how)
    trainer.strategy.barrier()  # under DDP rank 0 may still remove the last one
    run.keep(score=saves.best_model_score, kept=len(list(run.folder.glob("step=*"))))  # type: ignore[arg-type]
    how = _behind(run, save_frozen=False)
    run.fit(_Schedules(), ckpt_path=saves.best_model_path, max_epochs=3, **how)


@program()
def saved_in_the_background_and_changed(run: Run) -> None:
    """`save_async=True`: weights and buffers that are written right after a save are in it as they were."""

    class Changes(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            trainer.save_checkpoint(run.folder / f"{trainer.global_step}.ckpt")
            with torch.no_grad():
                pl_module.net[1].running_mean.add_(1)

    class Normalized(_WithAdam):
        def build(self) -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 4))

    run.fit(Normalized(), callbacks=[Changes()], **_behind(run))
    run.fit(Normalized(), ckpt_path=run.folder / "3.ckpt", max_epochs=2, **_behind(run))


class _Earlier(_WithAdam):
    """A module whose network had another name, and a bias with another sign."""

    def __init__(self) -> None:
        super().__init__()
        self.body = self.net
        del self.net

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _rename(state: dict[str, Any]) -> None:
    for name in [name for name in state if name.startswith("body.")]:
        state[name.replace("body.", "net.")] = state.pop(name)
    state["net.2.bias"].neg_()


def _from_earlier(run: Run, make: Callable[[], pl.LightningModule]) -> None:
    """A fit of the earlier module, and another of this one from its checkpoint."""
    path = str(run.folder / "earlier.ckpt")
    run.fit(_Earlier()).save_checkpoint(path)
    run.fit(make(), max_epochs=2, ckpt_path=path)


@program(on_three_ranks=True)
def resumed_through_a_hook(run: Run) -> None:
    """A checkpoint of an earlier version of the module: a hook of `load_state_dict` renames and changes weights."""

    class Now(_WithAdam):
        def __init__(self) -> None:
            super().__init__()
            self.register_load_state_dict_pre_hook(lambda module, state, *rest: _rename(state))

    _from_earlier(run, Now)


@program()
def resumed_through_load_state_dict(run: Run) -> None:
    """The same in an override of `load_state_dict`."""

    class Now(_WithAdam):
        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            state = dict(state_dict)
            _rename(state)
            return super().load_state_dict(state, strict, assign)

    _from_earlier(run, Now)


@program()
def resumed_through_on_load_checkpoint(run: Run) -> None:
    """The same in `on_load_checkpoint`."""

    class Now(_WithAdam):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            _rename(checkpoint["state_dict"])

    _from_earlier(run, Now)
