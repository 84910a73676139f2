"""Lightning's ``BaseFinetuning`` callbacks under ZeRO.

They refuse every ``DeepSpeedStrategy``, whose optimizer takes no parameters in the middle of a fit. Ours does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import BaseFinetuning

if TYPE_CHECKING:
    import lightning.pytorch as pl


class _Finetunes(BaseFinetuning):
    """Comes right before ``BaseFinetuning`` in the order of methods, after all classes of the user's."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        try:
            super().setup(trainer, pl_module, stage)
        except NotImplementedError as error:  # the last thing that it does
            if "DeepSpeed strategy" not in str(error):
                raise


def allow_finetuning(trainer: pl.Trainer) -> list[Any]:
    """Let the finetuning callbacks of ``trainer`` run under ZeRO. Returns those that :func:`forbid_again` takes."""
    callbacks: list[Any] = [
        each
        for each in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(each, BaseFinetuning) and not isinstance(each, _Finetunes)
    ]
    for callback in callbacks:
        cls = type(callback)
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}  # for the key of its state
        callback.__class__ = type(cls.__name__, (cls, _Finetunes), names)
    return callbacks


def forbid_again(callbacks: list[Any]) -> None:
    """Undo :func:`allow_finetuning`."""
    while callbacks:
        callback = callbacks.pop()
        callback.__class__ = type(callback).__bases__[0]
