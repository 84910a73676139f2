"""DeepCompile, DeepSpeed's compiled ZeRO, on our reduction."""
