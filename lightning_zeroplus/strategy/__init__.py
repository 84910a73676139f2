"""Strategies: when a reduction happens, and the life of the engine.

Start with ``zero`` (the Trainer and DeepSpeed), ``fsdp`` (the Trainer and FSDP2) or ``fabric``; ``window`` is what they
share. Settings: ``config``, ``config_checks``, ``config_types``, ``arguments``; of the Trainer, ``allowed_callbacks``.
Files: ``checkpoint``, ``fsdp_checkpoint``. Processes: ``launcher``, ``process``, ``accelerator``. ``names`` registers
all of them.
"""
