"""Checkpoints, and what happens before and after a fit."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_zeroplus as zp
from tests.programs.base import Manual, Regression, step
from tests.programs.own_optimizers import LAMB
from tests.programs.program import Refusal, program
from tests.programs.run import Run, pairs

_UNEVEN = Refusal("MisconfigurationException", "limit_val_batches")


class _WithAdam(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


def _save_and_resume(run: Run, made: type[Regression]) -> None:
    """Train an epoch, save, and go on in a new module."""
    path = run.folder / "one.ckpt"
    run.fit(made()).save_checkpoint(path)
    run.fit(made(), max_epochs=2, ckpt_path=path)


@program(on_three_ranks=True)
def resume(run: Run) -> None:
    """`save_checkpoint`, and `fit(ckpt_path=...)` with a new module."""
    _save_and_resume(run, _WithAdam)


@program(on_three_ranks=True)
def resume_adafactor(run: Run) -> None:
    """Adafactor, whose state has a value for each row and column, resumed."""

    class WithAdafactor(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adafactor(self.parameters(), 0.05)

    _save_and_resume(run, WithAdafactor)


@program(on_three_ranks=True)
def resume_lamb(run: Run) -> None:
    """LAMB, resumed."""

    class WithLamb(Regression):
        def configure_optimizers(self) -> Any:
            return LAMB(self.parameters(), 0.02)

    _save_and_resume(run, WithLamb)


@program()
def resume_in_mid_epoch(run: Run) -> None:
    """A fit that `max_steps` ends in the middle of an epoch, and one that goes on."""
    run.fit(_WithAdam(), max_epochs=-1, max_steps=2).save_checkpoint(run.folder / "two.ckpt")
    run.fit(_WithAdam(), max_epochs=2, ckpt_path=run.folder / "two.ckpt")


@program()
def resume_manual(run: Run) -> None:
    """A manual loop that resumes."""

    class ByHand(Manual):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    _save_and_resume(run, ByHand)


@program()
def resume_with_another_optimizer(run: Run) -> None:
    """Weights only: `load_from_checkpoint` before a fit with SGD."""
    path = run.folder / "one.ckpt"
    run.fit(_WithAdam()).save_checkpoint(path, weights_only=True)
    fresh = Regression()
    fresh.load_state_dict(_state_dict(run, path))
    run.fit(fresh)


def _state_dict(run: Run, path: Any) -> dict[str, Tensor]:
    """The weights of a checkpoint, whichever form it has."""
    if not path.is_dir():
        return torch.load(path, weights_only=False, map_location="cpu")["state_dict"]
    file = run.folder / "weights.safetensors"
    zp.export(path, file)
    return load_file(file)


class _Adapter(_WithAdam):
    """A frozen network and an adapter."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"base": nn.Linear(8, 4).requires_grad_(False), "adapter": nn.Linear(8, 4)})

    def forward(self, x: Tensor) -> Tensor:
        return self.net["base"](x) + self.net["adapter"](x)  # type: ignore[index]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net["adapter"].parameters(), 0.01)  # type: ignore[index]


class _SavesAdapter(_Adapter):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = {key: value for key, value in checkpoint["state_dict"].items() if "adapter" in key}
        checkpoint["state_dict"] = kept


def _keep_checkpoint(run: Run, module: Regression) -> None:
    """Fit, save, and compare the names and the values of the checkpoint's weights."""
    path = run.folder / "kept.ckpt"
    run.fit(module).save_checkpoint(path)
    weights = _state_dict(run, path)
    run.keep(**{f"saved.{name}": value for name, value in weights.items()})


@program()
def adapters_only(run: Run) -> None:
    """`on_save_checkpoint` keeps only an adapter's weights."""
    _keep_checkpoint(run, _SavesAdapter())


@program()
def renamed_keys(run: Run) -> None:
    """`on_save_checkpoint` renames keys; `on_load_checkpoint` renames them back."""

    class Renames(_WithAdam):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {f"old_{key}": value for key, value in checkpoint["state_dict"].items()}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {key.removeprefix("old_"): value for key, value in state.items()}

    _save_and_resume(run, Renames)


@program()
def scaled_on_load(run: Run) -> None:
    """`on_load_checkpoint` changes the weights that are loaded."""

    class Scales(_WithAdam):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {key: 0.5 * value for key, value in state.items()}

    _save_and_resume(run, Scales)


@program()
def scaled_in_place_on_load(run: Run) -> None:
    """`on_load_checkpoint` writes to some of the weights that are loaded, and to a part of one; it asks for a shape."""

    class Scales(_WithAdam):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            first, _, last, bias = (checkpoint["state_dict"][key] for key in sorted(checkpoint["state_dict"]))
            assert first.shape == (16,) and first.device.type == "cpu"
            last.data.mul_(0.5)
            bias[1].add_(last.abs().sum())
            checkpoint["state_dict"]["net.0.bias"] += 0.25

    _save_and_resume(run, Scales)


@program()
def state_dict_overridden(run: Run) -> None:
    """An overridden `state_dict()` leaves the frozen network out."""

    class Leaves(_Adapter):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            full = super().state_dict(*args, **kwargs)
            return {key: value for key, value in full.items() if "adapter" in key}

    _keep_checkpoint(run, Leaves())


@program()
def more_in_the_checkpoint(run: Run) -> None:
    """`on_save_checkpoint` adds what `on_load_checkpoint` reads."""

    class Adds(_WithAdam):
        scale = 1.0

        def on_train_epoch_end(self) -> None:
            self.scale *= 0.5

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["scale"] = self.scale

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.scale = checkpoint["scale"]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.scale * self.loss(batch)

    _save_and_resume(run, Adds)


@program(on_three_ranks=True)
def checkpoint_loads_under_ddp(run: Run) -> None:
    """A checkpoint's weights are loaded under DDP, and trained on."""
    path = run.folder / "here.ckpt"
    run.fit(_WithAdam()).save_checkpoint(path)
    module = _WithAdam()
    module.load_state_dict(_state_dict(run, path))
    run.fit(module, strategy="auto" if run.alone else "ddp")


@program()
def validate_test_predict(run: Run) -> None:
    """`validate` before, `validate`, `test` and `predict` after a fit, of one module."""

    class All(_WithAdam):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])

    module = All()
    run.keep(before=run.trainer().validate(module, run.loader(2), verbose=False)[0]["val_loss"])
    trainer = run.fit(module)
    run.keep(after=trainer.validate(module, run.loader(2), verbose=False)[0]["val_loss"])
    run.keep(test=trainer.test(module, run.loader(2), verbose=False)[0]["test_loss"])
    predicted: Any = trainer.predict(module, run.loader(2))
    run.keep(predicted=torch.cat(predicted))


@program()
def sanity_check_and_limits(run: Run) -> None:
    """A sanity check before the fit, limits of batches, and a check of validation twice an epoch."""
    run.fit(
        _WithAdam(),
        run.loader(8),
        run.loader(4),
        num_sanity_val_steps=2,
        limit_train_batches=6,
        limit_val_batches=2,
        val_check_interval=3,
        max_epochs=2,
    )


@program()
def fast_dev_run(run: Run) -> None:
    """`fast_dev_run=2`."""
    run.fit(_WithAdam(), val=run.loader(), fast_dev_run=2, logger=False)


@program()
def iterable_dataset(run: Run) -> None:
    """An IterableDataset without a length, and `max_steps`."""
    data = list(run.loader(3))

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            yield from data

    run.fit(_WithAdam(), DataLoader(Stream(), batch_size=None), max_steps=5, max_epochs=-1)


@program()
def data_module(run: Run) -> None:
    """A LightningDataModule, whose loader is made anew for every epoch."""

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return run.loader(2 + self.trainer.current_epoch)  # type: ignore[union-attr]

    module = _WithAdam()
    run.compare(module)
    run.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(module, datamodule=Data())


@program(on_three_ranks=True)
def metrics_of_an_epoch(run: Run) -> None:
    """torchmetrics in training and validation, reset by Lightning, and outputs gathered by hand."""
    import torchmetrics

    class Measures(_WithAdam):
        def __init__(self) -> None:
            super().__init__()
            self.error = torchmetrics.MeanSquaredError()
            self.outputs: list[Tensor] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            out = self(batch[0])
            self.error(out, batch[1])
            self.log("error", self.error, on_epoch=True)
            self.outputs.append(out)

        def on_validation_epoch_end(self) -> None:
            self.log("mean", self.all_gather(torch.cat(self.outputs)).mean())
            self.outputs.clear()

    run.fit(Measures(), val=run.loader(2), max_epochs=2)


@program()
def interrupted_by_an_error(run: Run) -> None:
    """A fit that an error of the user's ends on all ranks; another fit of the same module follows."""

    class Fails(_WithAdam):
        fails = True

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.fails and batch_idx == 1:
                raise ZeroDivisionError("the user's own")

    module = Fails()
    try:
        run.fit(module)
    except ZeroDivisionError:
        module.fails = False
    run.fit(module)


@program()
def same_optimizer_settings_twice(run: Run) -> None:
    """Two manual fits of one module with other learning rates."""

    class Twice(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            step(self.optimizers())

    module = Twice()
    for lr in (0.1, 0.02):
        module.lr = lr
        run.fit(module)


def _train_plainly(net: nn.Module) -> None:
    """Two steps without a Trainer, on the same data everywhere."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x, y = pairs(torch.Generator().manual_seed(3), 6)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()


@program(on_three_ranks=True)
def then_a_plain_loop(run: Run) -> None:
    """A fit, then a loop without a Trainer on the same network."""
    module = Regression()
    run.fit(module)
    _train_plainly(module.net)
    run.keep(**{name.replace(".", "_"): param for name, param in run.state(module.net).items()})


@program()
def then_ddp(run: Run) -> None:
    """A fit, then one under DDP with the same module."""
    module = Regression()
    run.fit(module)
    run.fit(module, strategy="auto" if run.alone else "ddp")


@program()
def ddp_first(run: Run) -> None:
    """A fit under DDP, then one with the strategy, of the same module."""
    module = Regression()
    run.fit(module, strategy="auto" if run.alone else "ddp")
    run.fit(module)


@program()
def then_a_forward(run: Run) -> None:
    """The trained network is called, and its `state_dict()` read, after the fit."""
    module = Regression()
    run.fit(module)
    with torch.no_grad():
        run.keep(out=module(torch.ones(2, 8)))
    weights = Regression()
    weights.load_state_dict({name: _plain(value) for name, value in module.state_dict().items()})
    run.keep(reloaded=weights(torch.ones(2, 8)))


def _plain(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@program()
def twice_with_new_trainers(run: Run) -> None:
    """Two fits of one module, each with a new Trainer."""
    module = Regression()
    run.fit(module)
    run.fit(module)


@program()
def twice_with_one_trainer(run: Run) -> None:
    """Two fits with one Trainer, the second of another, larger module."""

    class Larger(Regression):
        def build(self) -> nn.Module:
            return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 4))

    trainer = run.trainer()
    for module in (Regression(), Larger()):
        run.compare(module)
        trainer.fit(module, run.loader())
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit_loop.epoch_loop.batch_progress.reset()


@program()
def settings_stay(run: Run) -> None:
    """The strategy's settings are after a fit what they were before."""
    trainer = run.trainer()
    before = copy.deepcopy(getattr(trainer.strategy, "config", None))
    module = Regression()
    run.compare(module)
    trainer.fit(module, run.loader())
    run.keep(changed=float(getattr(trainer.strategy, "config", None) != before))


@program()
def saved_before_the_first_step(run: Run) -> None:
    """`trainer.save_checkpoint` in `on_train_start`; the fit goes on, and another one begins from the checkpoint."""
    path = run.folder / "first.ckpt"

    class Saves(_WithAdam):
        def on_train_start(self) -> None:
            self.trainer.save_checkpoint(path)

    run.fit(Saves())
    run.fit(_WithAdam(), ckpt_path=path)


@program(refused={"stage3*": _UNEVEN, "fsdp*": _UNEVEN})
def uneven_validation(run: Run) -> None:
    """Ranks validate on different numbers of batches."""
    run.fit(Regression(), run.loader(), run.loader(3 if run.rank == 0 else 2))


class _KeepsOptimizer(Regression):
    kept: Any = None

    def configure_optimizers(self) -> Any:
        if self.kept is None:
            self.kept = [super().configure_optimizers()]
        return self.kept[0]


_OF_AN_EARLIER_FIT = Refusal("MisconfigurationException", "optimizer of an earlier fit.*Return a new one")


@program(refused={"stage[123]*": _OF_AN_EARLIER_FIT, "fsdp*": _OF_AN_EARLIER_FIT})
def same_optimizer_twice(run: Run) -> None:
    """`configure_optimizers` returns the same optimizer object for a second fit."""
    module = _KeepsOptimizer()
    run.fit(module, run.loader())
    run.fit(module, run.loader())


class _KeepsTwo(_KeepsOptimizer, Manual):
    def configure_optimizers(self) -> Any:
        if self.kept is None:
            first, head = self.net[0], self.net[2]  # type: ignore[index]
            self.kept = [torch.optim.Adam(part.parameters(), 0.01) for part in (first, head)]
        return self.kept

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            step(optimizer)


@program(refused={"stage[123]*": _OF_AN_EARLIER_FIT, "fsdp*": _OF_AN_EARLIER_FIT}, reference="single")
def same_optimizers_twice(run: Run) -> None:
    """The same two optimizers for a second fit, with their states."""
    module = _KeepsTwo()
    run.fit(module, run.loader())
    run.fit(module, run.loader())


class _MadeEarly(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.made = [torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)]

    def configure_optimizers(self) -> Any:
        return self.made[0]


@program()
def optimizer_made_early(run: Run) -> None:
    """The optimizer is made in `__init__`, and returned by `configure_optimizers`."""
    run.fit(_MadeEarly(), run.loader())


class _FailsInForward(Regression):
    """An LSTM whose second batch fails between two of its layers."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"lstm": nn.LSTM(8, 8), "head": nn.Linear(8, 4)})

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.net["lstm"](x)  # type: ignore[index]
        if self.global_step == 1:
            raise LookupError("no such sample")
        return self.net["head"](hidden)  # type: ignore[index]


@program()
def fails_in_forward(run: Run) -> None:
    """A forward raises on all ranks: the fit ends with that very error, and another module is trained next."""
    run.compare(module := Regression())
    try:
        run.trainer().fit(_FailsInForward(), run.loader())
    except Exception as error:
        run.keep(own=float(str(error).endswith("no such sample")))
    run.watch.start = None
    run.fit(module)
