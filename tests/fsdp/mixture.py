"""Raw FSDP2 around deferring layers: units that mix deferred bf16 weights with ordinary biases, as in gpt-oss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_zeroplus.weight_grads.convert import give_store
from lightning_zeroplus.weight_grads.grouped import DeferredGroupedLinear
from lightning_zeroplus.weight_grads.linear import DeferredLinear
from lightning_zeroplus.weight_grads.store import WeightGradStore
from tests.fsdp.training import full

DIM, EXPERTS = 16, 3


class MixtureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = DeferredLinear(DIM, 2 * DIM)
        self.down = DeferredLinear(2 * DIM, DIM)
        self.experts = DeferredGroupedLinear(EXPERTS, DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        counts = torch.tensor([len(x) // 2, 0, len(x) - len(x) // 2])  # an expert without rows
        return x + torch.tanh(self.experts(x, counts))


class MixtureNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = DeferredLinear(DIM, DIM)  # of a unit whose input requires no gradient
        self.blocks = nn.ModuleList(MixtureBlock() for _ in range(2))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build(param_dtype: torch.dtype | None = torch.bfloat16, make: Callable[[], nn.Module] = MixtureNet) -> Any:
    """The sharded net: parameters in fp32, gathered and differentiated in bf16, reduced in fp32."""
    torch.manual_seed(0)
    net = make()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype, torch.float32)
    for block in net.modules():
        if isinstance(block, MixtureBlock):
            fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(net, mesh=mesh, mp_policy=policy)


def batch(rank: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + 17 * rank + 1000 * index)
    return torch.randn(8, DIM, generator=generator), torch.randn(8, DIM, generator=generator)


def loss(net: nn.Module, index: int, rank: int | None = None) -> Tensor:
    x, y = batch(torch.distributed.get_rank() if rank is None else rank, index)
    return F.mse_loss(net(x).float(), y)


def set_sync(net: nn.Module, sync: bool) -> None:
    for unit in net.modules():
        if isinstance(unit, FSDPModule):
            unit.set_requires_gradient_sync(sync)


def grads(net: nn.Module) -> dict[str, Tensor]:
    return {name: full(p.grad) for name, p in net.named_parameters() if p.grad is not None}


def plain(micro_batches: int, **kwargs: Any) -> dict[str, Tensor]:
    """FSDP2 as it is: nothing deferred, the last micro-batch reduces."""
    net = build(**kwargs)
    for index in range(micro_batches):
        set_sync(net, index == micro_batches - 1)
        loss(net, index).backward()
    return grads(net)


def deferring(net: nn.Module, store: WeightGradStore | None = None) -> WeightGradStore:
    store = store if store is not None else WeightGradStore()
    assert give_store(net, store) == sum(isinstance(m, (DeferredLinear, DeferredGroupedLinear)) for m in net.modules())
    return store


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
