"""The block calls ``Trainer(...).fit(module)``. Replaced: its GPUs, by two CPU processes."""

from unittest import mock

import lightning.pytorch
import torch  # noqa: F401  # for the block

import lightning_zeroplus as zp  # noqa: F401  # for the block
from tests.docs.small import OnCPUs, Small

module = Small()
before = OnCPUs.fits
with mock.patch.object(lightning.pytorch, "Trainer", OnCPUs):
    Trainer = OnCPUs
    # BLOCK
assert OnCPUs.fits > before  # each was compared with the reference
