"""DeepSpeed's config: ``settings`` completes it, ``checks`` and ``types`` refuse what cannot be right."""
