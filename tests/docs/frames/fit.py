"""The block calls ``Trainer(...).fit(module)``. Replaced: its GPUs, by two CPU processes."""

from unittest import mock

import lightning.pytorch
import torch  # noqa: F401  # for the block

import lightning_zeroplus as zp  # noqa: F401  # for the block
from tests.docs.small import OnTwoCPUs, Small

module = Small()
before = OnTwoCPUs.fits
with mock.patch.object(lightning.pytorch, "Trainer", OnTwoCPUs):
    Trainer = OnTwoCPUs
    # BLOCK
assert OnTwoCPUs.fits > before  # each was compared with the reference
