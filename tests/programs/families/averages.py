"""`zp.EMA`, compared with an average by hand under DDP."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from safetensors.torch import load_file
from torch import Tensor, nn

import lightning_zeroplus as zp
from tests.programs.base import Manual, Regression, step
from tests.programs.program import program
from tests.programs.run import Run, make_strategy

_DDP = "ddp_find_unused_parameters_true"
#: The average is DDP's to 1e-7. The training itself depends on the order in which ranks add: on three ranks, and on
#: some processors, it is off by 2.4e-7 of the way.
_ON_MORE_RANKS: dict[str, Any] = {"on_three_ranks": True, "bound": 1e-7, "bound_of_updates": 1e-6}


class _ByHand(pl.Callback):
    """What `zp.EMA` is, for whole weights."""

    def __init__(self, decay: float, every_n_steps: int = 1, warmup: float = 0) -> None:
        self.decay, self.every, self.warmup = decay, every_n_steps, warmup
        self.average: dict[str, Tensor] = {}
        self.updates = self.latest = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.average = self.average or {name: p.detach().float().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step % self.every == 0 and trainer.global_step > self.latest:
            self.latest = trainer.global_step
            self.updates += 1
            decay = min(self.decay, (1 + self.updates) / (self.warmup + self.updates))
            for name, param in pl_module.named_parameters():
                self.average[name].mul_(decay).add_(param.detach().float(), alpha=1 - decay)

    def _swap(self, pl_module: pl.LightningModule) -> None:
        for name, param in pl_module.named_parameters():
            mine = param.detach().clone()
            param.data.copy_(self.average[name])
            self.average[name] = mine

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap(pl_module)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap(pl_module)


def make_ema(run: Run, *arguments: Any, **keywords: Any) -> Any:
    """`zp.EMA`, or by hand for the reference."""
    return (_ByHand if run.strategy.startswith(("ddp", "single")) else zp.EMA)(*arguments, **keywords)


def average_of(run: Run, trainer: pl.Trainer, ema: Any) -> dict[str, Tensor]:
    """By hand, or as `zp.export` writes it."""
    average: dict[str, Tensor] | None = getattr(ema, "average", None)
    if average is None:
        trainer.save_checkpoint(run.folder / "averaged.ckpt")
        zp.export(run.folder / "averaged.ckpt", run.folder / f"averaged-{run.rank}.safetensors")
        average = load_file(run.folder / f"averaged-{run.rank}.safetensors")
    return average


def _keep(run: Run, trainer: pl.Trainer, ema: Any) -> None:
    run.keep(**{f"average.{name}": value for name, value in average_of(run, trainer, ema).items()})


class _WithAdam(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


class _Uneven(_WithAdam):
    """Sizes that no number of ranks divides, a frozen and an unused parameter, and one without dimensions."""

    def build(self) -> nn.Module:
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 1)
        net = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4))
        net[2].bias.requires_grad_(False)
        return net

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.net(x)


@program(reference=_DDP, **_ON_MORE_RANKS, stays=("unused.*",))
def ema(run: Run) -> None:
    """`zp.EMA`, which validates with the average; the average as `zp.export` writes it."""
    average = make_ema(run, 0.8)
    _keep(run, run.fit(_Uneven(), val=run.loader(2), callbacks=[average], max_epochs=3), average)


@program(bound=2e-7)  # of the training itself: where gradients are reduced in buckets, it moves by 1.1e-7 of the way
def ema_now_and_then(run: Run) -> None:
    """`zp.EMA` every third optimizer step, with a warm-up, and several batches per step."""
    average = make_ema(run, 0.9, every_n_steps=3, warmup=10)
    how: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 3}
    _keep(run, run.fit(_WithAdam(), run.loader(9), run.loader(2), callbacks=[average], max_epochs=2, **how), average)


@program(bound=1e-7)
def ema_of_several_optimizers(run: Run) -> None:
    """`zp.EMA` in a manual loop of two optimizers without a state."""

    class Two(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            first, second = self.optimizers()
            self.manual_backward(self.loss(batch))
            step(first)
            step(second)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[index].parameters(), 0.1) for index in (0, 2)]  # type: ignore[index]

    average = make_ema(run, 0.7)
    _keep(run, run.fit(Two(), val=run.loader(2), callbacks=[average], max_epochs=2), average)


#: Where a fit goes on that began under a strategy.
_NEXT = {"ddp": _DDP, "stage0": "stage3", "stage1": "stage2", "stage2": "stage0", "stage3": "stage1", "fsdp": "fsdp"}


def _resumed(run: Run, then: str) -> None:
    average = make_ema(run, 0.8, warmup=5)
    trainer = run.fit(_Uneven(), val=run.loader(2), callbacks=[average], max_epochs=2)
    path = run.folder / "two.ckpt"
    trainer.save_checkpoint(path)
    if not isinstance(average, _ByHand):
        average = zp.EMA(0.8, warmup=5)
    if then == _DDP:
        zp.export(path, run.folder / "one.ckpt", optimizer=True)
        trainer.strategy.barrier()
        path = run.folder / "one.ckpt"
    how: dict[str, Any] = {"strategy": make_strategy(then), "ckpt_path": path, "callbacks": [average]}
    trainer = run.fit(_Uneven(), val=run.loader(2), max_epochs=4, **how)
    _keep(run, trainer, average)


@program(reference=_DDP, **_ON_MORE_RANKS, stays=("unused.*",))
def ema_resumed_at_another_stage(run: Run) -> None:
    """`zp.EMA` goes on at another stage."""
    _resumed(run, _NEXT[run.strategy.partition("_")[0]])


@program(reference=_DDP, bound=1e-7, stays=("unused.*",))
def ema_resumed_under_ddp(run: Run) -> None:
    """`zp.EMA` goes on under DDP, from the file that `zp.export(optimizer=True)` writes."""
    _resumed(run, _DDP)


@program(bound=2e-7, reference="single")  # of the training itself: 1.3e-7 of the way
def ema_of_what_is_unfrozen(run: Run) -> None:
    """`zp.EMA`, and a backbone that is frozen at first and added to the optimizer later."""

    class Backbone(_WithAdam):
        def build(self) -> nn.Module:
            self.backbone = nn.Linear(8, 8)
            return nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            return self.net(torch.tanh(self.backbone(x)))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 0.05)

    average = make_ema(run, 0.8)
    tuning = callbacks.BackboneFinetuning(1, verbose=False)
    _keep(run, run.fit(Backbone(), val=run.loader(2), callbacks=[tuning, average], max_epochs=3), average)


class _Gathers(_ByHand):
    """From the weights of the same run, which are gathered in each step: training rounds both alike."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with zp.gathered(pl_module):
            super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        with zp.gathered(pl_module):
            super().on_train_batch_end(trainer, pl_module)

    def _swap(self, pl_module: pl.LightningModule) -> None:
        pass  # `zp.EMA` does


def _to_the_bit(run: Run, module: pl.LightningModule, *arguments: Any, **fit: Any) -> None:
    by_hand, average = _Gathers(*arguments), zp.EMA(*arguments)
    trainer = run.fit(module, val=run.loader(2), callbacks=[by_hand, average], **fit)
    trainer.save_checkpoint(run.folder / "averaged.ckpt")
    zp.export(run.folder / "averaged.ckpt", run.folder / f"averaged-{run.rank}.safetensors")
    exported = load_file(run.folder / f"averaged-{run.rank}.safetensors")
    wrong = [name for name, value in by_hand.average.items() if not torch.equal(exported[name], value.cpu())]
    assert exported.keys() == by_hand.average.keys() and by_hand.updates == average.updates > 2 and not wrong, wrong


@program()
def ema_to_the_bit(run: Run) -> None:
    """`zp.EMA` is the average of the same weights, gathered in each step, to the bit."""
    _to_the_bit(run, _WithAdam(), 0.7, max_epochs=2)


@program(reference=_DDP, stays=("unused.*",))
def ema_of_uneven_parameters_to_the_bit(run: Run) -> None:
    """The same with frozen, unused and uneven parameters, every second step, with a warm-up and accumulation."""
    _to_the_bit(run, _Uneven(), 0.9, 2, 10, max_epochs=3, accumulate_grad_batches=2, val_check_interval=3)
