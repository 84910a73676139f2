"""Precision plugins: how backward, clipping and the optimizer step reach the engine."""
