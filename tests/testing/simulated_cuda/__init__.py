"""The simulated CUDA device: what it does as CUDA does, and whole fits on it."""
