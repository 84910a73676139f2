"""The parts of :class:`~lightning_zeroplus.GradientAudit`: computed gradients, consumed gradients, their difference."""
