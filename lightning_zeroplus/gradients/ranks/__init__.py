"""Whether the ranks do the same, and how they take part in what others do. Start with ``lockstep``."""
