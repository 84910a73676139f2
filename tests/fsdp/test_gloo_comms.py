"""Within a unit's reduction, FSDP2 asks for the size of a padded gradient once."""

from __future__ import annotations

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from lightning_zeroplus.fsdp.gloo_comms import with_known_sizes


def test_sizes_are_those_of_fsdp2() -> None:
    upstream = _fsdp_collectives._get_dim0_padded_size
    sizes = [torch.Size(size) for size in ([5, 3], [8], [1, 2, 2], [5, 3])]
    with with_known_sizes():
        known = _fsdp_collectives._get_dim0_padded_size
        assert known is not upstream
        found = [known(size, 4) for size in sizes]
        assert found == [upstream(size, 4) for size in sizes]
        assert all(isinstance(each, torch.Size) for each in found)
        assert found[0] is found[-1]
    assert _fsdp_collectives._get_dim0_padded_size is upstream
