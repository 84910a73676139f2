"""FSDP2 and deferred weight gradients. Nothing here needs Lightning or DeepSpeed."""
