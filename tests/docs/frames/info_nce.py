"""The block holds methods of a LightningModule whose cached loss is InfoNCE; here are the data and the optimizer."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F  # noqa: F401  # for the block
from torch import nn  # noqa: F401  # for the block
from torch.utils.data import DataLoader

import lightning_zeroplus as zp  # noqa: F401  # for the block
from tests.docs.small import fit


class Module(pl.LightningModule):
    # BLOCK

    def train_dataloader(self):
        rows = torch.randn(80, 2, 8, generator=torch.Generator().manual_seed(self.global_rank))
        return DataLoader([{"queries": row[0], "documents": row[1]} for row in rows], batch_size=40)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
module = Module()
before = [param.detach().clone() for param in module.parameters()]
fit(module, "zeroplus_stage2")
assert not any(torch.equal(param.detach(), old) for param, old in zip(module.parameters(), before, strict=True))
assert torch.isfinite(module.trainer.callback_metrics["loss"])
