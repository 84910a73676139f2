"""As ``fit``, on four processes. The strategy has two replicas of two shards."""

from unittest import mock

import lightning.pytorch

from tests.docs.small import OnCPUs, Small

module = Small()
before = OnCPUs.fits
with mock.patch.object(lightning.pytorch, "Trainer", OnCPUs):
    # BLOCK
    pass
assert OnCPUs.fits > before
assert strategy.device_mesh["replicate", "shard"].shape == (2, 2)  # type: ignore[name-defined]  # noqa: F821
