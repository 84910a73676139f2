"""Weights that ZeRO stage 3 has partitioned, as a user's code meets them. Start with ``access``."""
