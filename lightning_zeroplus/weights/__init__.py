"""Weights as users see them. Start with ``gathered``.

A user who accesses a weight gets the whole weight or an error. After the fit all weights are ordinary parameters.
"""
