"""Checkpoints of engines: ``engine_files`` is for the Trainer and for Fabric, ``fabric_files`` for Fabric."""
