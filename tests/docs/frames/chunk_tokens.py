"""The block holds methods of a LightningModule with a cached loss of texts; here are the encoder and the texts."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_zeroplus as zp
from tests.docs.small import fit

seen = []


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 16)

    def forward(self, text):
        seen.append(text["input_ids"].shape)
        mask = text["attention_mask"][..., None]
        return (self.words(text["input_ids"]) * mask).sum(1) / mask.sum(1)


def contrastive_loss(queries, documents):
    scores = queries @ documents.T
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def text(generator):
    lengths = torch.randint(1, 65, (40 + 8 * torch.distributed.get_rank(),), generator=generator)
    ids = torch.randint(100, (len(lengths), 64), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(64) < lengths[:, None]).long()}


class Module(pl.LightningModule):
    # BLOCK

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(self.global_rank)
        return DataLoader([(text(generator), text(generator)) for _ in range(2)], batch_size=None)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
module = Module()
before = module.encoder.words.weight.detach().clone()
fit(module, "zeroplus_stage3")
with zp.gathered(module):
    assert not torch.equal(module.encoder.words.weight.detach(), before)
assert all(rows * tokens <= 512 for rows, tokens in seen)
