"""The block holds methods of a LightningModule with a cached loss; here are the loss, the data and the optimizer."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_zeroplus as zp
from tests.docs.small import fit


def contrastive_loss(queries, documents):
    scores = queries @ documents.T
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


class Module(pl.LightningModule):
    # BLOCK

    def train_dataloader(self):
        rows = torch.randn(80, 2, 8, generator=torch.Generator().manual_seed(self.global_rank))
        return DataLoader([{"queries": row[0], "documents": row[1]} for row in rows], batch_size=40)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
monitor = zp.ReductionMonitor()
module = Module()
before = module.encoder.weight.detach().clone()
fit(module, "zeroplus_stage2", callbacks=[monitor])
assert not torch.equal(module.encoder.weight.detach(), before)
assert [step.bytes for step in monitor.history] == [sum(p.nbytes for p in module.parameters())] * 2
assert torch.isfinite(module.trainer.callback_metrics["loss"])
