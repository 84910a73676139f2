"""The folder where DeepSpeed's operators are kept once they are compiled: one for each environment."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

VARIABLE = "TORCH_EXTENSIONS_DIR"


def choose_extensions_folder() -> Path:
    """Set ``TORCH_EXTENSIONS_DIR``, before anything is compiled, unless the user has set it.

    torch's own default is one folder for all environments of a user, and an operator that was built with another torch
    or DeepSpeed is built anew: two environments would take turns, and processes would wait for each other's lock.

    Returns:
        The folder that the variable names.
    """
    # An empty variable is unset for torch, too.
    chosen = os.environ.get(VARIABLE) or str(_folder_of_environment())
    os.environ[VARIABLE] = chosen
    return Path(chosen)


def _folder_of_environment() -> Path:
    """A folder of this environment; of the user's cache, where the environment must not be written."""
    own = Path(sys.prefix, "torch_extensions")
    if os.access(own if own.exists() else sys.prefix, os.W_OK):
        return own
    of_this = f"{sys.prefix}\n{sys.version}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cache / "lightning_zeroplus" / f"torch_extensions-{hashlib.sha256(of_this.encode()).hexdigest()[:16]}"
