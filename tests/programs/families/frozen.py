"""A fit that goes on from a checkpoint with other parameters frozen.

Under DDP a parameter that was frozen before starts without a state; the state of one that is frozen now waits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import lightning_zeroplus as zp
from tests.programs.base import Regression
from tests.programs.fabric_base import fabric_program, make_net, train_on
from tests.programs.program import COMPILE, Refusal, program
from tests.programs.run import Run


class Trunk(Regression):
    """The first layer is the trunk; the optimizer has it, frozen or not."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.net[0].requires_grad_(not frozen)  # type: ignore[index]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


class FrozenForAnEpoch(Trunk):
    """In the second epoch, which a resumed fit begins with."""

    def __init__(self) -> None:
        super().__init__(frozen=True)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch == 2)  # type: ignore[index]


def saved(run: Run, module: Any, **options: Any) -> Path:
    """A checkpoint after an epoch."""
    path = run.folder / "one.ckpt"
    run.fit(module, max_epochs=1, **options).save_checkpoint(path)
    return path


def _as_file(run: Run, module: Any) -> Path:
    """The same in a file, as plain Lightning has it."""
    path = saved(run, module)
    if path.is_dir():
        zp.export(path, run.folder / "file.ckpt", optimizer=True)
        run.trainers[-1].strategy.barrier()
        path = run.folder / "file.ckpt"
    return path


@program(on_three_ranks=True, also=COMPILE)
def unfrozen_for_the_resumed_fit(run: Run) -> None:
    """A head is trained; then the fit goes on with the trunk, too."""
    run.fit(Trunk(False), ckpt_path=saved(run, Trunk(True)), max_epochs=2)


@program(also=COMPILE, refused={"*_compile": Refusal("RuntimeError", "states of frozen parameters.*under `compile`")})
def frozen_for_the_resumed_fit(run: Run) -> None:
    """Everything is trained; then the fit goes on with the head alone."""
    run.fit(Trunk(True), ckpt_path=saved(run, Trunk(False)), max_epochs=2)


@program(reference="single", on_three_ranks=True)
def frozen_for_an_epoch_of_the_resumed_fit(run: Run) -> None:
    """Everything is trained; the resumed fit trains the head for an epoch, and then everything, with Adam's moments."""
    run.fit(FrozenForAnEpoch(), ckpt_path=saved(run, Trunk(False)), max_epochs=3)


@program(reference="single", precision="bf16-true")
def frozen_for_an_epoch_in_bf16(run: Run) -> None:
    """The same in bf16."""
    run.fit(FrozenForAnEpoch(), ckpt_path=saved(run, Trunk(False)), max_epochs=3)


@program(reference="single")
def frozen_for_an_epoch_and_read_with_code(run: Run) -> None:
    """The same with `fit(weights_only=False)`, which reads checkpoints that contain code."""
    path, module = saved(run, Trunk(False)), FrozenForAnEpoch()
    run.compare(module)
    run.trainer(max_epochs=3).fit(module, run.loader(), ckpt_path=path, weights_only=False)


@program()
def unfrozen_and_read_with_code(run: Run) -> None:
    """A head is trained; then the fit goes on with the trunk, too, by `fit(weights_only=False)`."""
    path, module = saved(run, Trunk(True)), Trunk(False)
    run.compare(module)
    run.trainer(max_epochs=2).fit(module, run.loader(), ckpt_path=path, weights_only=False)


@program()
def unfrozen_for_the_fit_from_a_file(run: Run) -> None:
    """A head is trained; from a plain file, which `zp.export` writes, the fit goes on with the trunk, too."""
    run.fit(Trunk(False), ckpt_path=_as_file(run, Trunk(True)), max_epochs=2)


@program(reference="single")
def frozen_for_an_epoch_of_the_fit_from_a_file(run: Run) -> None:
    """Everything is trained; from a plain file the fit goes on with the head for an epoch, then with everything."""
    run.fit(FrozenForAnEpoch(), ckpt_path=_as_file(run, Trunk(False)), max_epochs=3)


@program()
def unfrozen_group_of_the_resumed_fit(run: Run) -> None:
    """A group of the optimizer is frozen in the first fit, and has a learning rate of its own in the second."""

    class Groups(Trunk):
        def configure_optimizers(self) -> Any:
            trunk, _, head = self.net  # type: ignore[misc]
            return torch.optim.AdamW([{"params": [*trunk.parameters()], "lr": 0.003}, {"params": [*head.parameters()]}])

    run.fit(Groups(False), ckpt_path=saved(run, Groups(True)), max_epochs=2)


@program(reference="single")
def frozen_for_an_epoch_with_an_average(run: Run) -> None:
    """`zp.EMA` goes on in a fit that trains the head for an epoch, and then everything."""
    path = run.folder / "one.ckpt"
    run.fit(Trunk(False), val=run.loader(2), callbacks=[zp.EMA(0.8)], max_epochs=1).save_checkpoint(path)
    run.fit(FrozenForAnEpoch(), val=run.loader(2), callbacks=[zp.EMA(0.8)], ckpt_path=path, max_epochs=3)


class _Two(FrozenForAnEpoch):
    """An optimizer for each layer."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.net[0].requires_grad_(not frozen)  # type: ignore[index]
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        trunk, _, head = self.net  # type: ignore[misc]
        return [torch.optim.AdamW(trunk.parameters(), 0.01), torch.optim.AdamW(head.parameters(), 0.003)]

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.net[0].requires_grad_(True)  # type: ignore[index]


@program(reference="single")
def frozen_for_an_epoch_with_its_optimizer(run: Run) -> None:
    """Two optimizers, of which one is frozen for an epoch of the resumed fit."""
    run.fit(_Two(True), ckpt_path=saved(run, _Two(False)), max_epochs=3)


@program()
def unfrozen_with_its_optimizer(run: Run) -> None:
    """Two optimizers, of which one is frozen in the first fit."""
    run.fit(_Two(False), ckpt_path=saved(run, _Two(True)), max_epochs=2)


def _loaded(run: Run, first: bool, second: bool, unfrozen_at: int) -> None:
    """Two loops, the second of which loads what the first has saved; the trunk is frozen in those that are True."""
    fabric, path = run.fabric(), run.folder / "one.ckpt"
    for number, frozen in enumerate((first, second)):
        net = make_net()
        net[0].requires_grad_(not frozen)  # type: ignore[index]
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.01))
        if number:
            fabric.load(path, {"model": model, "optimizer": optimizer})
            run.compare(net)
        for at, batch in enumerate(run.loader(6)):
            if number and at == unfrozen_at:
                net[0].requires_grad_(True)  # type: ignore[index]
            train_on(fabric, model, optimizer, batch)
        if not number:
            fabric.save(path, {"model": model, "optimizer": optimizer})


@fabric_program()
def fabric_unfrozen_when_loaded(run: Run) -> None:
    """A head is trained; `fabric.load` goes on with the trunk, too."""
    _loaded(run, True, False, 0)


@fabric_program(reference="single")
def fabric_frozen_when_loaded(run: Run) -> None:
    """Everything is trained; after `fabric.load` the trunk is frozen for three steps, and has Adam's moments then."""
    _loaded(run, False, True, 3)
