"""Silence what Lightning, DeepSpeed and PyTorch say about things that are as they should be."""

from __future__ import annotations

import logging
import warnings


def quiet() -> None:
    """Keep warnings that a reader of an example can act on; drop the others."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # The data are in memory: there is nothing for worker processes to do.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # DeepSpeed and Lightning call functions of PyTorch by names that PyTorch is about to change.
    warnings.filterwarnings("ignore", message=".*(torch.distributed|LeafSpec).* is deprecated", category=FutureWarning)
