"""Sharded parameters that behave like whole tensors."""
