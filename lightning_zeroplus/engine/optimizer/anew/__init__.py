"""Another optimizer in the middle of a fit, or another group: the engine's methods are in ``exchanges``.

``exchange`` takes the torch optimizers apart and joins others, ``partitions`` builds upstream's optimizer anew, and
``carried`` keeps the state meanwhile. ``marks`` are on optimizers that others have replaced, and ``stepped`` finds the
one that steps. ``unfrozen`` looks for parameters that have become trainable.
"""
