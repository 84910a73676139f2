"""The block is the ``training_step`` of a GAN, which is trained at stages 2 and 3, and by DDP."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: F401

from tests.docs.small import Small, fit


class Module(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net = None
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(3, 8), nn.Linear(8, 1)

    def noise(self, batch: Tensor) -> Tensor:
        return batch[:, :3].flip(0)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), 0.01) for net in (self.generator, self.discriminator)]

    def on_train_end(self) -> None:
        pass

    # BLOCK


assert "training_step" in vars(Module)
trained = []
for strategy in ("ddp_find_unused_parameters_true", "zeroplus_stage2", "zeroplus_stage3"):
    module = Module()
    fit(module, strategy)
    trained.append(torch.cat([param.detach().flatten() for param in module.parameters()]))
assert all(torch.allclose(trained[0], other, rtol=0, atol=1e-6) for other in trained[1:])
