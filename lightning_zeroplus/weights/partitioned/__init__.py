"""Weights that ZeRO stage 3 has partitioned, as the user's code sees them. Start with ``access``."""
