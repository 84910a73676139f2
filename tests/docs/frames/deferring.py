"""The block names a model with ``blocks``, and the sizes of experts."""

from torch import nn

import lightning_zeroplus as zp

model = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "head": nn.Linear(4, 2)})
experts, in_features, out_features = 4, 8, 16
# BLOCK
assert [type(layer).__name__ for layer in model["blocks"]] == ["DeferredLinear"] * 2
assert not isinstance(model["head"], zp.DeferredLinear)
