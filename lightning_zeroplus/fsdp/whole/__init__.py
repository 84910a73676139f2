"""Sharded parameters that behave as the whole tensors they are parts of."""
