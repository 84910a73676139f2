"""A file for each family of upstream's optimizers: how gradients accumulate, and the overrides on upstream.

``choose`` picks one of ``replicated`` (stage 0, and stage 1 with ``BF16_Optimizer``), ``zero12``, ``zero3``, and
``older_deepspeed`` for releases that lack an optional feature. They share ``masters`` (fp32 weights), ``zeroes``
(``zero_grad()``), ``norms``, and ``outside`` (parameters that no optimizer has).
"""
