"""DeepCompile, DeepSpeed's compiled ZeRO, with the engine's own reduction."""
