"""DeepSpeed's config: ``settings`` completes it, ``checks`` and ``types`` refuse wrong settings."""
