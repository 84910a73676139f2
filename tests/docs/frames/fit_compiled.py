"""As ``fit``. Replaced, too: the backend inductor, which takes half a minute, by the backend eager."""

from unittest import mock

import lightning.pytorch

from tests.docs.small import OnCPUs, Small


class Eager(OnCPUs):
    def __init__(self, **given):
        super().__init__(**given)
        assert self.strategy.compile_options.backend == "inductor"
        self.strategy.compile_options = self.strategy.compile_options._replace(backend="eager")


module = Small()
before = OnCPUs.fits
with mock.patch.object(lightning.pytorch, "Trainer", Eager):
    # BLOCK
    pass
assert OnCPUs.fits > before
