"""``python -m lightning_zeroplus doctor``: what this machine can do, and what is in the way."""

from lightning_zeroplus.doctor.checks import Finding, examine
from lightning_zeroplus.doctor.command import run

__all__ = ["Finding", "examine", "run"]
