"""``python -m lightning_zeroplus doctor``: what this machine supports, and which problems it has."""

from lightning_zeroplus.doctor.checks import examine
from lightning_zeroplus.doctor.command import run
from lightning_zeroplus.doctor.finding import Finding

__all__ = ["Finding", "examine", "run"]
