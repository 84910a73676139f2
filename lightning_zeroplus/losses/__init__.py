"""Losses for manual optimization."""
