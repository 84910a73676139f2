"""Strategies: when a reduction happens, and the life of the engine."""
