"""The block trains ``model`` on ``batch`` with ``optimizer``, which must be as without deferring."""

import copy

import torch
from torch import nn

import lightning_zeroplus as zp  # noqa: F401  # for the block

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
plain = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.randn(4, 8)
# BLOCK
plain(batch).sum().backward()
torch.optim.SGD(plain.parameters(), lr=0.1).step()
assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
