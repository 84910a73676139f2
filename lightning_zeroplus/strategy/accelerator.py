"""Make DeepSpeed use the accelerator that the Trainer uses.

DeepSpeed picks its accelerator once, when it is first imported, from ``DS_ACCELERATOR`` or from what it finds.
"""

from __future__ import annotations

import os
import sys

from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from lightning.pytorch.utilities.exceptions import MisconfigurationException

_VARIABLE = "DS_ACCELERATOR"


def select_deepspeed_accelerator(accelerator: Accelerator) -> None:
    """Set ``DS_ACCELERATOR`` for the Trainer's accelerator, before DeepSpeed is imported.

    Raises:
        MisconfigurationException: If the accelerator is neither CPU nor CUDA, or DeepSpeed was imported, or
            ``DS_ACCELERATOR`` set, for another one.
    """
    if isinstance(accelerator, CPUAccelerator):
        wanted = "cpu"
    elif isinstance(accelerator, CUDAAccelerator):
        wanted = "cuda"
    else:
        raise MisconfigurationException(
            f"`ZeroPlusStrategy` runs on CPU and CUDA, not on `{type(accelerator).__name__}`."
            ' Use `Trainer(accelerator="cpu")` or `Trainer(accelerator="cuda")`.'
        )
    configured = os.environ.setdefault(_VARIABLE, wanted)
    if configured != wanted:
        raise MisconfigurationException(
            f"The environment says {_VARIABLE}={configured!r}, but the Trainer uses accelerator={wanted!r}."
            f" Unset {_VARIABLE}, or set it to {wanted!r}."
        )
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator()._name
    if chosen != wanted:
        raise MisconfigurationException(
            f"DeepSpeed was imported before the Trainer chose accelerator={wanted!r}, and settled for {chosen!r}."
            f" Set {_VARIABLE}={wanted} in the environment, or do not import deepspeed before the Trainer starts."
        )
