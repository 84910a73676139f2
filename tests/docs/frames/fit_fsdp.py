"""As ``fit``. The block also names a module class, ``Block``."""

from unittest import mock

import lightning.pytorch
from torch import nn

from tests.docs.small import OnCPUs, Small

Block = nn.Linear
module = Small()
before = OnCPUs.fits
with mock.patch.object(lightning.pytorch, "Trainer", OnCPUs):
    # BLOCK
    pass
assert OnCPUs.fits > before
