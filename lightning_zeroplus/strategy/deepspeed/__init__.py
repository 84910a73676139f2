"""ZeRO. Start with ``trainer`` and ``engine_strategy``, which builds the engine; ``fabric`` needs no Trainer."""
