"""The parts of :class:`~lightning_zeroplus.GradientAudit`: what went in, what came out, how far they are apart."""
