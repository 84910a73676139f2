"""The block is a hook of a LightningModule with a teacher, which is trained at stages 2 and 3 and under FSDP2."""

import copy

import torch

import lightning_zeroplus as zp
from tests.docs.small import Small, check_trained, fit


class Module(Small):
    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.25)

    def on_train_end(self):
        with zp.gathered(self):
            self.trained = torch.cat([param.detach().flatten() for param in self.net.parameters()])

    # BLOCK


for strategy in ("zeroplus_stage2", "zeroplus_stage3", "zeroplus_fsdp"):
    module = Module()
    start = copy.deepcopy(module.teacher)
    fit(module, strategy)
    check_trained(module)
    with zp.gathered(module.teacher):
        assert not torch.equal(module.teacher[0].weight, start[0].weight)
    assert module.trainer.callback_metrics["norm"] > 1
