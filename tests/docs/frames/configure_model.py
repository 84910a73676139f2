"""The block holds ``configure_model``, of a module whose ``net`` is None at first."""

from torch import nn  # noqa: F401  # for the block

from tests.docs.small import Small, fit


class Module(Small):
    def __init__(self):
        super().__init__()
        self.net = None

    # BLOCK

    def configure_optimizers(self):
        self.partitioned = all(param.ds_status.name == "NOT_AVAILABLE" for param in self.net.parameters())
        return super().configure_optimizers()


module = Module()
fit(module, "zeroplus_stage3")
assert module.partitioned and module.trainer.global_step == 2
