"""Lightning callbacks that look at what the engine does."""
