"""Deferred weight gradients: layers that defer them, and the store in which they wait.

They work under FSDP2, under ZeRO and alone. Nothing here needs Lightning or DeepSpeed.
"""
