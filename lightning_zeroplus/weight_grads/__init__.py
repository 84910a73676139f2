"""Weight gradients that are computed later: layers that defer theirs, and the store in which they wait.

They work under FSDP2, under ZeRO and alone. Nothing here needs Lightning or DeepSpeed.
"""
