"""Strategies: what Lightning sees, when a reduction happens, and the life of the engine.

``deepspeed`` for ZeRO, ``fsdp2``, and ``common`` for what both share. ``names`` registers all of them.
"""
