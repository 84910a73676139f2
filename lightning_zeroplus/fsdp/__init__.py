"""FSDP2's units. Start with ``units``; the folder ``whole`` lets weights and gradients look as under DDP.

Nothing here needs Lightning or DeepSpeed.
"""
