"""Another optimizer in the middle of a fit: ``unfrozen`` and added parameters (``rebuild``), and ``replaced`` ones.

``exchange`` takes the torch optimizers apart and joins others, ``partitions`` builds upstream's optimizer anew, and
``carried`` keeps the state meanwhile. ``marks`` are on those that were replaced.
"""
