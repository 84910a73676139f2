"""Strategies: when a reduction happens, and the life of the engine.

Start with ``zero`` (the Trainer and DeepSpeed), ``fsdp`` (the Trainer and FSDP2) or ``fabric``; ``window`` is what they
share. ``engine_strategy`` builds the engine for ``zero``; ``several`` joins optimizers. Settings: ``config``,
``config_checks``, ``config_types``, ``arguments``, ``compilation``. The Trainer: ``allowed_callbacks``, ``lengths``,
``meeting`` (where ranks that run different modules come together).
Files: ``checkpoint``, ``fsdp_checkpoint``. Processes: ``launcher``, ``process``, ``accelerator``. ``probe`` looks for
what Lightning must have. ``names`` registers all strategies.
"""
