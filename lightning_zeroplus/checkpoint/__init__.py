"""Checkpoints as files and tensors: no Trainer, no engine."""
