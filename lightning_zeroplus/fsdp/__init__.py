"""FSDP2's units. Start with ``units``. The folder ``whole`` makes weights and gradients look as under DDP.

Nothing here needs Lightning or DeepSpeed.
"""

from lightning_zeroplus.internals.torch import FSDP, check_imports

check_imports(FSDP)
