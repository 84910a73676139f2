"""An engine's state by parameter, for checkpoints.

``layout`` says where it lies, and ``parts`` reads and writes it. ``groups`` has the settings of the optimizers' groups.
"""
