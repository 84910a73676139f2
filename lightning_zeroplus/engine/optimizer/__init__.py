"""The user's torch optimizers, within upstream's: groups, states and steps as under DDP.

``groups`` and ``shown_states`` are what users see. ``chain`` joins several optimizers, ``several`` separates them
again. ``split_steps``, ``whole_steps`` and ``owned_steps`` step by parameter. ``anew`` exchanges them, or adds
parameters, and ``elementwise`` finds out whether an optimizer needs whole tensors.
"""
