"""One family of upstream's optimizers, one file: how its gradients accumulate, and what of upstream it overrides.

``choose`` picks one. ``replicated`` (stage 0), ``zero12``, ``zero3``; ``older_deepspeed`` for releases before 0.19.
``masters`` (fp32 weights), ``zeroes`` and ``norms`` are what they share.
"""
