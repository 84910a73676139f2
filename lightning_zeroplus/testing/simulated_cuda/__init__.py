"""A CUDA device without a GPU: real ``cuda:N`` tensors, streams and NCCL's rules on the CPU build of torch.

Kernels are the CPU's, on the same memory, and run at once. Everything else is torch's own code for CUDA: dispatch,
autocast, autograd's device threads and streams, Lightning's and DeepSpeed's accelerators. Everything that the device
does goes to a log.

Start at :func:`record`, which opens a log. ``RankPool(2, device="simulated_cuda")`` and ``python -m
lightning_zeroplus.testing.simulated_cuda script.py`` start processes that have the device. ``library.py`` builds it
from the C++ of ``native/``, ``boot.py`` loads it before torch, ``device.py`` and ``process_group.py`` supply what
``torch.cuda`` and ``torch.distributed`` miss, and ``order.py`` finds races in a log.
"""

from typing import TYPE_CHECKING, Any

from lightning_zeroplus.testing.simulated_cuda.library import SimulatedCudaError, why_unavailable

if TYPE_CHECKING:
    from lightning_zeroplus.testing.simulated_cuda.entry import Entry
    from lightning_zeroplus.testing.simulated_cuda.log import Log, Synchronization, record

__all__ = ["Entry", "Log", "SimulatedCudaError", "Synchronization", "record", "why_unavailable"]


def __getattr__(name: str) -> Any:
    # Not imported above: it imports DeepSpeed, which would fix its accelerator before the Trainer picks one.
    if name in ("Entry", "Log", "Synchronization", "record"):
        from lightning_zeroplus.testing.simulated_cuda import log

        return getattr(log, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
