"""Where checkpoints lie: a local path, or an address such as ``s3://bucket/last.ckpt``; start with ``place.py``."""
