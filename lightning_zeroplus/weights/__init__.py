"""Weights as users see them. Start with ``gathered``.

They are whole where they are asked for, else an error is raised, and they are ordinary after the fit.
"""
