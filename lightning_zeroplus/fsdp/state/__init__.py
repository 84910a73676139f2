"""The state of a sharded module as a whole: for checkpoints, and for ``zp.gathered``."""
