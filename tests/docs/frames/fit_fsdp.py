"""As ``fit``. The block also names a module class, ``Block``."""

from unittest import mock

import lightning.pytorch
from torch import nn

from tests.docs.small import OnTwoCPUs, Small

Block = nn.Linear
module = Small()
before = OnTwoCPUs.fits
with mock.patch.object(lightning.pytorch, "Trainer", OnTwoCPUs):
    # BLOCK
    pass
assert OnTwoCPUs.fits > before
