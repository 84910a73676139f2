"""FSDP2. Start with ``trainer``; ``sharding`` makes the units, ``gradients`` reduces, ``checkpoint`` saves."""
