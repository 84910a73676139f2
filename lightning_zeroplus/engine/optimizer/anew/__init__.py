"""Another optimizer in the middle of a fit: ``unfrozen`` and added parameters (``rebuild``), and ``replaced`` ones.

``partitions`` builds upstream's optimizer anew, and ``carried`` keeps an engine's state meanwhile.
"""
