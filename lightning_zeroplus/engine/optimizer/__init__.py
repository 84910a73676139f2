"""The user's torch optimizers, within upstream's: groups, states and steps as under DDP.

``groups`` and ``shown_states`` are what users see. ``chain`` joins several, ``several`` takes them apart again.
``split_steps`` and ``whole_steps`` step by parameter, ``rebuild`` makes partitions anew for ``unfrozen`` ones.
"""
