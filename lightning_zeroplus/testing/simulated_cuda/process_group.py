"""The backend ``"nccl"`` of ``torch.distributed`` in a process with the simulated device.

Nothing is imported from the package: this file runs before it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d

_VERSION = (2, 27, 5)
_Gloo: Any = ProcessGroupGloo


def install(native: ModuleType) -> None:
    """Let torch find NCCL. Nothing is restored: the process is for this.

    Args:
        native: The extension module.
    """

    class Options(torch._C._distributed_c10d.Backend.Options):
        """As of the real class; only kept."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__("nccl")
            self.is_high_priority_stream = is_high_priority_stream

    base: Any = native.Nccl

    class ProcessGroupNCCL(base):
        """NCCL's rules for tensors, devices and streams; the bytes go through Gloo."""

        def __init__(self, store: dist.Store, rank: int, size: int, options: Any = None, *_: Any) -> None:
            gloo = _Gloo._Options()
            gloo._devices = [_Gloo.create_device(hostname="127.0.0.1")]
            if options is not None:
                gloo._timeout = options._timeout
            self.options = Options() if options is None else options
            super().__init__(rank, size, _Gloo(store, rank, size, gloo))

        def _group_start(self) -> None:
            """Point-to-point operations are not grouped: each is over when it returns."""

        def _group_end(self) -> None:
            """As above."""

        def _shutdown(self) -> None:
            """Gloo ends with its last reference."""

    # DeepSpeed and DeviceMesh look for it there.
    ProcessGroupNCCL.Options = Options
    c10d: Any = distributed_c10d
    package: Any = dist
    c10d.ProcessGroupNCCL = package.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    # Gloo takes tensors of the device only in a CUDA build of torch; here it would crash instead of raising.
    dist.Backend.backend_capability["gloo"] = ["cpu"]
    torch.cuda.nccl.version = lambda: _VERSION
    torch._C._nccl_version = lambda: (_VERSION[0] << 32) | (_VERSION[1] << 16) | _VERSION[2]
    torch._C._nccl_version_suffix = lambda: b""
