"""The patched DeepSpeed engine. Nothing here imports Lightning."""
