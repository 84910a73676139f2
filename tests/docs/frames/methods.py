"""The block holds methods of a LightningModule, which is trained at stages 2 and 3."""

from tests.docs.small import Small, check_trained, fit


class Module(Small):
    # BLOCK
    pass


assert "training_step" in vars(Module)
for strategy in ("zeroplus_stage2", "zeroplus_stage3"):
    module = Module()
    fit(module, strategy)
    check_trained(module)
