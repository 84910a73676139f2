"""FSDP2's units. Start with ``units``. The folder ``whole`` makes weights and gradients look as under DDP.

Nothing here needs Lightning or DeepSpeed.
"""
