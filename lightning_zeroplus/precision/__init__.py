"""Precision plugins: they cast modules and batches, and pass backward, clipping and steps to the engine."""
